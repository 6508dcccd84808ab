"""Rules of elementwise operators and of tensor creation."""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree
from torch.fx import Node

from rannd.graph.fx.sizes import PROBE_ROWS, depends_on_rows
from rannd.graph.rows.rules.operation import RULES, Operation, aligned, filled, rule
from rannd.graph.rows.rules.states import FIXED, Arange, Coupled, RowIndex, Rows, State


def pointwise(op: Operation) -> State:
    """Elementwise operator with broadcasting."""
    state = aligned(op, [leaf for leaf in pytree.tree_leaves(op.args) if isinstance(leaf, Node)])
    value = op.node.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(Rows(each.ndim + state.dim, state.outer, state.inner) for each in value)
    return Rows(len(op.out) + state.dim, state.outer, state.inner)


# Operators that torch, or an older supported version, does not tag as pointwise.
_POINTWISE = """
    where dropout dropout_ native_dropout alpha_dropout masked_fill masked_fill_ fill fill_ zero_ copy copy_
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
        raise Coupled("prelu combines samples with a fixed tensor of the batch size")
    return rows


@rule("feature_dropout", "feature_alpha_dropout", "feature_dropout_", "feature_alpha_dropout_")
def feature_dropout(op: Operation) -> State:
    """Drops whole slices [sample, channel]."""
    rows = op.rows("input") or op.rows("self")
    if rows is None or rows.dim > 1:
        raise Coupled(f"{op.name} has one mask for several samples")
    return rows


@rule("zeros", "ones", "full", "empty", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty")
def create(op: Operation) -> State:
    """New tensor whose shape may depend on the number of rows, with constant or random values."""
    op.fixed(*(name for name in op.args if name not in ("self", "size")))
    return filled(op.out) if any(depends_on_rows(size) for size in op.node.meta["val"].shape) else FIXED


@rule("arange")
def arange(op: Operation) -> State:
    step = op.args.get("step", 1)
    if (
        len(op.out) == 1
        and op.out[0] != PROBE_ROWS
        and op.out[0] % PROBE_ROWS == 0
        and (op.args.get("start", 0), step) == (0, 1)
    ):
        return Arange(op.out[0] // PROBE_ROWS)
    if op.out != (PROBE_ROWS,) or op.args.get("start", 0) != 0 or type(step) is not int:
        raise Coupled("arange depends on the batch size in an unsupported way")
    return RowIndex(0, step)


@rule("to", "_to_copy", "type_as", "clone", "contiguous", "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy",
      "pin_memory")  # fmt: skip
def convert(op: Operation) -> State:
    """Copy, view or dtype conversion of `self`; of `other` only the dtype matters."""
    state = op.state(op.args["self"])
    if isinstance(state, RowIndex) and op.node.meta["val"].dtype in (torch.int32, torch.int64):
        return state
    return op.rows("self") or FIXED


@rule("_assert_tensor_metadata")
def check(op: Operation) -> State:
    """An assertion without a result."""
    return FIXED
