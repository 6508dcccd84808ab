"""What single operators do to the samples of a batch.

A rule takes an :class:`Operation` and returns the state of its result, or raises Coupled. A rule is only
asked where at least one argument depends on the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Node

from rannd.graph.row_states import FIXED, Coupled, Reduction, RowIndex, Rows, Scalar, State
from rannd.graph.sizes import PROBE_ROWS, depends_on_rows


@dataclass(frozen=True)
class Operation:
    """A call of an operator: its arguments by name, their states and their shapes at PROBE_ROWS rows."""

    name: str
    node: Node
    args: dict[str, Any]
    state: Callable[[Any], State]
    shape: Callable[[Any], tuple[int, ...]]

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the result."""
        if not isinstance(self.node.meta["val"], torch.Tensor):
            raise Coupled(f"{self.name} makes something else than one tensor")
        return self.shape(self.node)

    def rows(self, name: str) -> Rows | None:
        """State of a tensor argument as Rows, None where it is fixed; Coupled for anything else."""
        return self.as_rows(self.args.get(name))

    def as_rows(self, value: Any) -> Rows | None:
        """Like `rows`, for a value."""
        state = self.state(value)
        if state is FIXED or value is None:
            return None
        if isinstance(state, Rows):
            return state
        raise Coupled(f"{self.name} takes {_describe(state)}")

    def fixed(self, *names: str) -> None:
        """Coupled where one of the arguments depends on the samples."""
        for name in names:
            for value in _leaves(self.args.get(name)):
                if self.state(value) is not FIXED:
                    raise Coupled(f"argument {name} of {self.name} depends on the samples")


Rule = Callable[[Operation], State]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators (names without overload)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def _describe(state: State) -> str:
    return state.value if hasattr(state, "value") else f"a {type(state).__name__}"


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _dims(value: Any, ndim: int) -> set[int]:
    dims = range(ndim) if value is None or value == [] else _leaves(value)
    return {dim % ndim if ndim else 0 for dim in dims}


def relocate(outer: int, inner: int, shape: tuple[int, ...]) -> Rows:
    """Rows in a reshaped tensor: the only dimension that holds the rows, split into what lies before and behind."""
    holding = [dim for dim, size in enumerate(shape) if size and size % PROBE_ROWS == 0]
    if len(holding) != 1:
        raise Coupled("a reshape spreads the samples over several dimensions")
    (dim,) = holding
    before = prod(shape[:dim])
    if before == 0 or outer % before:
        raise Coupled("a reshape mixes samples")
    inside = outer // before
    rest, remainder = divmod(shape[dim], inside * PROBE_ROWS)
    if remainder or rest * prod(shape[dim + 1 :]) != inner:
        raise Coupled("a reshape mixes samples")
    return Rows(dim, inside, rest)


def aligned(op: Operation, values: list[Any]) -> Rows:
    """State of a broadcast of `values`: all that depend on the samples have them at the same place from the right."""
    found: set[tuple[int, int, int]] = set()
    for value in values:
        state = op.as_rows(value)
        if state is not None:
            found.add((len(op.shape(value)) - state.dim, state.outer, state.inner))
    if len(found) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((right, outer, inner),) = found
    for value in values:
        if isinstance(value, Node) and op.state(value) is FIXED:
            shape = op.shape(value)
            if len(shape) >= right and shape[-right] != 1:
                raise Coupled(f"{op.name} meets a fixed tensor of the size of the batch")
    return Rows(-right, outer, inner)


def pointwise(op: Operation) -> State:
    """Every element is made of the elements at the same place."""
    state = aligned(op, [leaf for leaf in pytree.tree_leaves(op.args) if isinstance(leaf, Node)])
    value = op.node.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(Rows(each.ndim + state.dim, state.outer, state.inner) for each in value)
    return Rows(len(op.out) + state.dim, state.outer, state.inner)


# Operators that torch does not tag as pointwise, or that older versions do not.
_POINTWISE = """
    where dropout dropout_ native_dropout alpha_dropout to _to_copy clone contiguous detach detach_ alias type_as
    masked_fill masked_fill_ lift_fresh lift_fresh_copy fill fill_ zero_ copy copy_
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like
    bernoulli bernoulli_ normal_ uniform_ exponential_ random_ log_normal_ geometric_ cauchy_
    relu relu6 elu selu celu gelu silu mish softplus leaky_relu threshold rrelu rrelu_with_noise hardtanh hardswish
    hardsigmoid hardshrink softshrink log_sigmoid sigmoid special_expit tanh
    add sub rsub subtract mul multiply div divide true_divide floor_divide fmod remainder pow square
    addcmul addcdiv lerp clip clip_ clamp clamp_ maximum minimum
    neg negative absolute sign exp log floor isnan isinf isfinite nan_to_num
    conj resolve_conj resolve_neg real imag arccos arcsin arctan
    logical_and logical_or logical_not bitwise_and __and__ __or__ __xor__ __ior__ __iand__
    greater less greater_equal less_equal not_equal
"""
for _name in _POINTWISE.split():
    RULES[_name] = pointwise


@rule("prelu")
def prelu(op: Operation) -> State:
    """The weight belongs to dimension 1, not to the last one."""
    op.fixed("weight")
    rows = op.rows("self")
    assert rows is not None
    if rows.dim == 1 and op.shape(op.args["weight"]) not in ((), (1,)):
        raise Coupled("prelu meets a fixed tensor of the size of the batch")
    return rows


@rule("feature_dropout", "feature_alpha_dropout", "feature_dropout_", "feature_alpha_dropout_")
def feature_dropout(op: Operation) -> State:
    """Drops or keeps all that lies behind the first two dimensions."""
    rows = op.rows("input") or op.rows("self")
    if rows is None or rows.dim > 1:
        raise Coupled(f"{op.name} has one mask for several samples")
    return rows


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
      "ravel", "_reshape_alias", "view_copy", "squeeze_", "unsqueeze_")  # fmt: skip
def reshape(op: Operation) -> State:
    """The row-major order of the elements stays."""
    source = op.args["self"]
    state = op.state(source)
    shape = op.shape(source)
    if isinstance(state, RowIndex):
        found = relocate(prod(shape[: state.dim]), prod(shape[state.dim + 1 :]), op.out)
        if (found.outer, found.inner) != (1, 1):
            raise Coupled(f"{op.name} repeats the positions of samples in one dimension")
        return RowIndex(found.dim)
    rows = op.rows("self")
    if rows is None:
        raise Coupled(f"{op.name} takes its shape from the samples")
    return relocate(prod(shape[: rows.dim]) * rows.outer, rows.inner * prod(shape[rows.dim + 1 :]), op.out)


def _moved(op: Operation, order: list[int]) -> State:
    """`order[new]` is the old dimension."""
    state = op.state(op.args["self"])
    if isinstance(state, RowIndex):
        return RowIndex(order.index(state.dim))
    rows = op.rows("self")
    assert rows is not None
    return Rows(order.index(rows.dim), rows.outer, rows.inner)


@rule("permute")
def permute(op: Operation) -> State:
    ndim = len(op.out)
    return _moved(op, [dim % ndim for dim in op.args["dims"]])


@rule("transpose", "transpose_", "swapaxes", "swapdims")
def transpose(op: Operation) -> State:
    ndim = len(op.out)
    first, second = (value for name, value in op.args.items() if name != "self")
    order = list(range(ndim))
    order[first % ndim], order[second % ndim] = order[second % ndim], order[first % ndim]
    return _moved(op, order)


@rule("t", "mT", "numpy_T", "adjoint", "matrix_H")
def matrix_transpose(op: Operation) -> State:
    ndim = len(op.out)
    order = list(range(ndim))
    if op.name == "numpy_T":
        order.reverse()
    elif ndim >= 2:
        order[-2], order[-1] = order[-1], order[-2]
    return _moved(op, order)


@rule("movedim", "moveaxis")
def movedim(op: Operation) -> State:
    ndim = len(op.out)
    sources = [dim % ndim for dim in _leaves(op.args["source"])]
    targets = [dim % ndim for dim in _leaves(op.args["destination"])]
    order = [-1] * ndim
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    return _moved(op, [dim if dim >= 0 else next(rest) for dim in order])


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(op: Operation) -> State:
    """New dimensions come at the left; a dimension of size 1 may be repeated up to the number of rows."""
    state = op.state(op.args["self"])
    source, out = op.shape(op.args["self"]), op.out
    if state is FIXED:
        if not (len(op.node.args) > 1 and op.state(op.args.get("other")) is not FIXED) and op.name != "expand":
            raise Coupled(f"{op.name} takes its shape from the samples")
        return relocate(_outer(out), _inner(out), out)
    added = len(out) - len(source)
    if isinstance(state, RowIndex):
        return RowIndex(state.dim + added)
    rows = op.rows("self")
    assert rows is not None
    return Rows(rows.dim + added, rows.outer, rows.inner)


def _holding(shape: tuple[int, ...]) -> int:
    holding = [dim for dim, size in enumerate(shape) if size and size % PROBE_ROWS == 0]
    if len(holding) != 1 or shape[holding[0]] != PROBE_ROWS:
        raise Coupled("a shape is made of the number of rows in a way no rule knows")
    return holding[0]


def _outer(shape: tuple[int, ...]) -> int:
    return prod(shape[: _holding(shape)])


def _inner(shape: tuple[int, ...]) -> int:
    return prod(shape[_holding(shape) + 1 :])


@rule("zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty")
def create(op: Operation) -> State:
    """A tensor of a shape made of the number of rows, the same (or random) everywhere."""
    op.fixed(*(name for name in op.args if name not in ("self", "size")))
    return Rows(_holding(op.out), 1, 1) if any(depends_on_rows(size) for size in op.node.meta["val"].shape) else FIXED


@rule("arange")
def arange(op: Operation) -> State:
    if op.out != (PROBE_ROWS,) or op.args.get("start", 0) != 0 or op.args.get("step", 1) != 1:
        raise Coupled("arange counts in a way no rule knows")
    return RowIndex(0)


def _away(op: Operation, name: str, dims: set[int]) -> Rows:
    """State of argument `name`, whose dimensions `dims` are worked on and must not hold the samples."""
    rows = op.rows(name)
    if rows is None:
        raise Coupled(f"{op.name} is steered by the samples")
    if rows.dim in dims:
        raise Coupled(f"{op.name} works across the samples")
    return rows


@rule("select", "slice", "narrow", "slice_copy", "select_copy")
def cut_out(op: Operation) -> State:
    """Part of one dimension; all of the batch dimension may be taken."""
    source = op.args["self"]
    shape = op.shape(source)
    dim = op.args["dim"] % len(shape)
    state = op.state(source)
    if op.name != "select" and shape == op.out:
        return state
    if isinstance(state, RowIndex):
        if state.dim == dim:
            raise Coupled(f"{op.name} takes some of the samples")
        return RowIndex(state.dim - (op.name.startswith("select") and dim < state.dim))
    rows = _away(op, "self", {dim})
    for name in ("index", "start", "end", "length"):
        if op.state(op.args.get(name)) is not FIXED:
            raise Coupled(f"{op.name} computes with the number of rows")
    dropped = op.name.startswith("select") and dim < rows.dim
    return Rows(rows.dim - dropped, rows.outer, rows.inner)


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(op: Operation) -> State:
    ndim = len(op.shape(op.args["self"]))
    rows = _away(op, "self", {op.args.get("dim", 0) % ndim})
    return (rows,) * len(op.node.meta["val"])


@rule("unbind")
def unbind(op: Operation) -> State:
    dim = op.args.get("dim", 0) % len(op.shape(op.args["self"]))
    rows = _away(op, "self", {dim})
    return (Rows(rows.dim - (dim < rows.dim), rows.outer, rows.inner),) * len(op.node.meta["val"])


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def join(op: Operation) -> State:
    """All parts have the samples at the same place, which is not where they are joined."""
    tensors = op.args["tensors"]
    ndim = len(op.out)
    if op.name in ("hstack", "vstack"):
        raise Coupled(f"{op.name} is not followed")
    dim = op.args.get("dim", 0) % ndim
    states = {op.as_rows(tensor) for tensor in tensors if prod(op.shape(tensor)) or len(op.shape(tensor)) != 1}
    if len(states) != 1 or None in states:
        raise Coupled(f"{op.name} combines different samples")
    (rows,) = states
    assert rows is not None
    if op.name == "stack":
        return Rows(rows.dim + (dim <= rows.dim), rows.outer, rows.inner)
    if rows.dim == dim:
        raise Coupled(f"{op.name} joins along the samples")
    return rows


@rule("broadcast_tensors")
def broadcast_tensors(op: Operation) -> State:
    rows = aligned(op, list(op.args["tensors"]))
    out = op.node.meta["val"]
    return (Rows(out[0].ndim + rows.dim, rows.outer, rows.inner),) * len(out)


@rule("repeat", "tile")
def repeat(op: Operation) -> State:
    shape, out = op.shape(op.args["self"]), op.out
    if op.state(op.args["self"]) is FIXED:
        return relocate(_outer(out), _inner(out), out)
    rows = op.rows("self")
    assert rows is not None
    added = len(out) - len(shape)
    if out[rows.dim + added] != shape[rows.dim]:
        raise Coupled(f"{op.name} repeats the samples")
    return Rows(rows.dim + added, rows.outer, rows.inner)


@rule("repeat_interleave")
def repeat_interleave(op: Operation) -> State:
    if not isinstance(op.args.get("repeats"), int) or op.args.get("dim") is None:
        raise Coupled("repeat_interleave is steered by a tensor")
    return _away(op, "self", {op.args["dim"] % len(op.out)})


@rule("flip", "roll", "cumsum", "cumprod", "softmax", "log_softmax", "_softmax", "_log_softmax", "sort", "argsort",
      "topk", "glu", "gather", "scatter", "scatter_add", "diff", "cummax", "cummin", "logcumsumexp", "index_add",
      "index_copy", "index_fill", "index_select", "scatter_", "scatter_add_", "triu", "tril", "take_along_dim", "cross",
      "kthvalue", "mode", "median", "scatter_reduce")  # fmt: skip
def along_dims(op: Operation) -> State:
    """Works along its dimensions and leaves all others alone."""
    ndim = len(op.shape(op.args["self"]))
    if op.name in ("triu", "tril"):
        dims = {ndim - 2, ndim - 1}
    else:
        along = op.args.get("dim", op.args.get("dims"))
        if along is None:
            raise Coupled(f"{op.name} works across all elements")
        dims = _dims(along, ndim)
    others = [value for key, value in op.args.items() if key != "self" and isinstance(value, Node)]
    if op.name.startswith("index_"):
        op.fixed("index")
        others = [value for value in others if value is not op.args.get("index")]
    states = {op.as_rows(value) for value in [op.args["self"], *others]}
    if len(states) != 1 or None in states:
        raise Coupled(f"{op.name} combines different samples")
    rows = _away(op, "self", dims)
    value = op.node.meta["val"]
    if op.name in ("kthvalue", "mode", "median"):
        keep = op.args.get("keepdim", False)
        rows = Rows(rows.dim - (0 if keep else sum(dim < rows.dim for dim in dims)), rows.outer, rows.inner)
    return (rows,) * len(value) if isinstance(value, (tuple, list)) else rows


@rule("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "norm", "linalg_vector_norm", "argmax",
      "argmin", "any", "all", "max", "min", "nansum", "nanmean", "count_nonzero", "var_mean", "std_mean",
      "aminmax")  # fmt: skip
def reduce(op: Operation) -> State:
    """Reduces some dimensions; over the batch dimension only sums and means make something that adds up."""
    if isinstance(op.args.get("other"), Node):
        return pointwise(op)
    state = op.state(op.args["self"])
    if isinstance(state, Scalar):
        return state if op.name in ("sum", "mean") else Scalar(Reduction.OTHER)
    shape = op.shape(op.args["self"])
    dims = _dims(op.args.get("dim"), len(shape))
    rows = op.rows("self")
    assert rows is not None
    value = op.node.meta["val"]
    if rows.dim in dims:
        if op.out == () and op.name in ("sum", "mean", "nansum", "count_nonzero"):
            return Scalar(Reduction.MEAN if op.name == "mean" else Reduction.SUM)
        raise Coupled(f"{op.name} works across the samples")
    keep = op.args.get("keepdim", False)
    left = Rows(rows.dim - (0 if keep else sum(dim < rows.dim for dim in dims)), rows.outer, rows.inner)
    return (left,) * len(value) if isinstance(value, (tuple, list)) else left


@rule("linear")
def linear(op: Operation) -> State:
    op.fixed("weight", "bias")
    return _away(op, "input", {len(op.shape(op.args["input"])) - 1})


def _product(op: Operation, left: Any, right: Any) -> Rows:
    """Matrix product with broadcast leading dimensions; dimensions counted from the right."""
    a, b = op.as_rows(left), op.as_rows(right)
    places = set()
    if a is not None:
        ndim = len(op.shape(left))
        place = ndim - a.dim
        if ndim == 1 or place == 1:
            raise Coupled(f"{op.name} sums over the samples")
        if place == 2 and b is not None:
            raise Coupled(f"{op.name} multiplies all samples with each other")
        right_ndim = len(op.shape(right))
        if place == 2 and right_ndim == 1:
            place = 1
        places.add((place, a.outer, a.inner))
    if b is not None:
        ndim = len(op.shape(right))
        place = ndim - b.dim
        if ndim == 1 or place == 2:
            raise Coupled(f"{op.name} sums over the samples")
        if place == 1 and a is not None:
            raise Coupled(f"{op.name} multiplies all samples with each other")
        if len(op.shape(left)) == 1 and place >= 3:
            place -= 1
        places.add((place, b.outer, b.inner))
    if len(places) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((place, outer, inner),) = places
    if len(op.shape(right)) == 1 and a is not None and len(op.shape(left)) - a.dim > 2:
        place -= 1
    for value, state in ((left, a), (right, b)):
        shape = op.shape(value)
        if state is None and place > 2 and len(shape) >= place and shape[-place] != 1:
            raise Coupled(f"{op.name} meets a fixed tensor of the size of the batch")
    return Rows(len(op.out) - place, outer, inner)


@rule("matmul", "mm", "bmm", "__matmul__", "mv")
def matmul(op: Operation) -> State:
    left, right = list(op.args.values())[:2]
    return _product(op, left, right)


@rule("addmm", "baddbmm", "addmv")
def addmm(op: Operation) -> State:
    _, left, right = list(op.args.values())[:3]
    rows = _product(op, left, right)
    added = op.as_rows(op.args["self"])
    shape = op.shape(op.args["self"])
    place = len(op.out) - rows.dim
    if added is None:
        if len(shape) >= place and shape[-place] != 1:
            raise Coupled(f"{op.name} adds a fixed tensor of the size of the batch")
    elif (len(shape) - added.dim, added.outer, added.inner) != (place, rows.outer, rows.inner):
        raise Coupled(f"{op.name} combines different samples")
    return rows


@rule("einsum")
def einsum(op: Operation) -> State:
    equation = op.args["equation"].replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise Coupled("einsum with an ellipsis or without a result is not followed")
    inputs, result = equation.split("->")
    found = set()
    for letters, tensor in zip(inputs.split(","), op.args["tensors"], strict=True):
        rows = op.as_rows(tensor)
        if rows is not None:
            found.add((letters[rows.dim], rows.outer, rows.inner))
    if len(found) != 1:
        raise Coupled("einsum combines different samples")
    ((letter, outer, inner),) = found
    for letters, tensor in zip(inputs.split(","), op.args["tensors"], strict=True):
        if op.state(tensor) is FIXED and letter in letters:
            raise Coupled("einsum meets a fixed tensor of the size of the batch")
    if letter not in result:
        raise Coupled("einsum sums over the samples")
    return Rows(result.index(letter), outer, inner)


@rule("scaled_dot_product_attention")
def attention(op: Operation) -> State:
    values = [op.args[name] for name in ("query", "key", "value")]
    mask = op.args.get("attn_mask")
    rows = aligned(op, values if mask is None else [*values, mask])
    if -rows.dim <= 2:
        raise Coupled("attention works across the samples")
    return Rows(len(op.out) + rows.dim, rows.outer, rows.inner)


@rule("embedding")
def embedding(op: Operation) -> State:
    op.fixed("weight")
    if op.args.get("scale_grad_by_freq"):
        raise Coupled("embedding scales its gradient by how often an index is in the batch")
    rows = op.rows("indices")
    assert rows is not None
    return rows


@rule("one_hot")
def one_hot(op: Operation) -> State:
    if not isinstance(op.args.get("num_classes"), int) or op.args["num_classes"] < 0:
        raise Coupled("one_hot takes the number of classes from the samples")
    rows = op.rows("self")
    assert rows is not None
    return rows


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
      "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
      "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
      "upsample_bicubic2d", "upsample_trilinear3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col",
      "col2im", "group_norm", "max_pool2d_with_indices", "max_pool1d_with_indices", "_adaptive_avg_pool2d")  # fmt: skip
def samples_first(op: Operation) -> State:
    """Each entry of dimension 0 is worked on alone (the input is batched, with the samples in dimension 0)."""
    name = "input" if "input" in op.args else "self"
    op.fixed("weight", "bias")
    rows = op.rows(name)
    out = op.node.meta["val"]
    shape = op.shape(op.args[name])
    first = out[0] if isinstance(out, (tuple, list)) else out
    if rows is None or rows.dim != 0 or first.ndim != len(shape) or len(shape) < 3:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    spatial = next((int(digit) for digit in op.name if digit.isdigit()), 0)
    if spatial and len(shape) != spatial + 2 and op.name != "convolution":
        raise Coupled(f"{op.name} is not batched")
    return (rows,) * len(out) if isinstance(out, (tuple, list)) else rows


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
      "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(op: Operation) -> State:
    values = _leaves(op.args.get("pad", op.args.get("padding")))
    shape = op.shape(op.args["self"])
    padded = {len(shape) - 1 - place // 2 for place, value in enumerate(values) if value != 0}
    return _away(op, "self", padded)


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(op: Operation) -> State:
    op.fixed("weight", "bias")
    ndim = len(op.shape(op.args["input"]))
    rows = _away(op, "input", set(range(ndim - len(op.args["normalized_shape"]), ndim)))
    out = op.node.meta["val"]
    return (rows,) * len(out) if isinstance(out, (tuple, list)) else rows


@rule("batch_norm")
def batch_norm(op: Operation) -> State:
    if op.args["training"]:
        raise Coupled("batch_norm normalises over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return _away(op, "input", {1})


@rule("instance_norm")
def instance_norm(op: Operation) -> State:
    if isinstance(op.args.get("running_mean"), Node) and op.args["use_input_stats"]:
        raise Coupled("instance_norm keeps statistics over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return _away(op, "input", set(range(1, len(op.out))))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(op: Operation) -> State:
    """(output, states ...); states are (layers, batch, width)."""
    if "batch_first" not in op.args:
        raise Coupled(f"{op.name} of packed sequences is not followed")
    rows = op.rows("input")
    first = 0 if op.args["batch_first"] else 1
    if rows is None or rows.dim != first or len(op.shape(op.args["input"])) != 3:
        raise Coupled(f"{op.name} does not have the samples where it expects the batch")
    op.fixed("params")
    for state in _leaves(op.args["hx"]):
        found = op.as_rows(state)
        if found is not None and (found.dim, found.outer, found.inner) != (1, rows.outer, rows.inner):
            raise Coupled(f"{op.name} has a state of other samples")
    return (rows, *(Rows(1, rows.outer, rows.inner),) * (len(op.node.meta["val"]) - 1))


@rule("index", "_unsafe_index")
def index(op: Operation) -> State:
    """tensor[i, j, ...]: looks up in a fixed table, or within each sample."""
    source, indices = op.args["self"], list(op.args["indices"])
    used = [dim for dim, value in enumerate(indices) if value is not None]
    if not used or any(indices[dim].meta["val"].dtype in (torch.bool, torch.uint8) for dim in used):
        raise Coupled("index with a mask is not followed")
    if used != list(range(used[0], used[0] + len(used))):
        raise Coupled("index with tensors that are apart is not followed")
    states = [op.state(indices[dim]) for dim in used]
    width = max(len(op.shape(indices[dim])) for dim in used)
    start = used[0]
    rows = op.rows("self") if op.state(source) is not FIXED else None
    if rows is not None and rows.dim not in used:
        if any(state is not FIXED for state in states):
            raise Coupled("index combines different samples")
        shift = width - len(used) if rows.dim > start else 0
        return Rows(rows.dim + shift, rows.outer, rows.inner)
    places: set[tuple[int, int, int]] = set()
    for dim, state in zip(used, states, strict=True):
        ndim = len(op.shape(indices[dim]))
        if isinstance(state, RowIndex):
            if rows is None or dim != rows.dim or (rows.outer, rows.inner) != (1, 1):
                raise Coupled("index uses the position of a sample in the batch")
            places.add((ndim - state.dim, 1, 1))
        elif isinstance(state, Rows):
            places.add((ndim - state.dim, state.outer, state.inner))
        elif state is not FIXED:
            raise Coupled("index is steered by a number made of all samples")
        if rows is not None and dim == rows.dim and not isinstance(state, RowIndex):
            raise Coupled("index picks samples")
    if len(places) != 1:
        raise Coupled("index combines different samples")
    ((place, outer, inner),) = places
    for dim, state in zip(used, states, strict=True):
        shape = op.shape(indices[dim])
        if state is FIXED and len(shape) >= place and shape[-place] != 1:
            raise Coupled("index combines different samples")
    return Rows(start + width - place, outer, inner)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss")  # fmt: skip
def elementwise_loss(op: Operation) -> State:
    reduction = op.args.get("reduction", 1)
    rows = aligned(op, [value for value in op.args.values() if isinstance(value, Node)])
    if reduction == 0:
        return Rows(len(op.out) + rows.dim, rows.outer, rows.inner)
    return Scalar(Reduction.MEAN if reduction == 1 else Reduction.SUM)


CLASS_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
"""Losses whose mean is over the labels that count."""


@rule(*CLASS_LOSSES)
def class_loss(op: Operation) -> State:
    """As any loss; `rannd.graph.rows` knows when the denominator of the mean can be given from outside.

    The classes are in dimension 1. Labels have all other dimensions of the input, probabilities have all.
    """
    op.fixed("weight")
    rows, target = op.rows("self"), op.rows("target")
    ndim = len(op.shape(op.args["self"]))
    if rows is None or rows.dim == 1 or ndim < 2:
        raise Coupled(f"{op.name} does not have one prediction for each sample")
    labels = Rows(rows.dim - (rows.dim > 1), rows.outer, rows.inner)
    if target != (rows if len(op.shape(op.args["target"])) == ndim else labels):
        raise Coupled(f"{op.name} combines different samples")
    if op.args["reduction"] == 0:
        return labels
    return Scalar(Reduction.MEAN if op.args["reduction"] == 1 else Reduction.SUM)
