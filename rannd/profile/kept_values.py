"""Estimates which values autograd saves for the backward of a block, from the names of its operators.

No torch in this file. For an unknown name, all inputs and outputs of the operator count as saved, so the estimate is
rather too high than too low. Two things cannot be derived from a name: what an opaque operator saves inside (only its
inputs and outputs count), and the attention weights of attention that is not fused (they do not count).

A view counts as the value whose memory it shares, as a whole: a slice keeps all of that memory alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from rannd.graph.fx.ir import Op, Size, TaskGraph


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _names(
    "linear mm bmm addmm baddbmm matmul mv addmv dot einsum conv1d conv2d conv3d convolution conv_transpose1d "
    "conv_transpose2d conv_transpose3d bilinear"
)
"""Products of two operands: the gradient of one needs the other."""
ATTENTION = "scaled_dot_product_attention"
LOOKUPS = _names("embedding index index_select gather take_along_dim")
"""Operators that read as many bytes of their first operand as they write."""
_SAME_MEMORY = _names(
    "view view_as _unsafe_view transpose t mT permute movedim swapaxes unsqueeze squeeze alias detach lift_fresh "
    "lift_fresh_copy unflatten expand expand_as view_as_real view_as_complex real imag"
)
_PARTS = _names("slice select narrow split split_with_sizes chunk unbind tensor_split unfold diagonal")
_SPREAD = _names("transpose t mT permute movedim swapaxes expand expand_as")
"""After these, and after slices, elements are not contiguous: reshape copies."""
_RESHAPES = _names("reshape reshape_as flatten contiguous")
_VIEWS = _SAME_MEMORY | _PARTS | _RESHAPES
SUMS = _names("add sub")
"""Operators whose backward passes the gradient on unchanged."""
_NOTHING = SUMS | _names(
    "rsub neg sum mean cat stack concat clone copy to _to_copy type_as repeat roll flip pad constant_pad_nd "
    "cumsum new_zeros zeros_like ones_like full_like arange"
)
_OTHERS = _names("mul div true_divide multiply divide") | PRODUCTS
"""Save an operand if another one requires a gradient."""
_UNGRADED = _names("where masked_fill scatter scatter_add index_add index_put") | LOOKUPS
"""Save the operands that require no gradient: masks and indices."""
_MADE = _names("softmax _softmax log_softmax _log_softmax sigmoid tanh exp relu sqrt rsqrt elu reciprocal")
_READ = _names(
    "gelu silu layer_norm group_norm rms_norm batch_norm native_layer_norm native_batch_norm pow log log1p abs clamp "
    "clamp_min clamp_max hardtanh relu6 hardswish mish sin cos erf softplus leaky_relu avg_pool2d adaptive_avg_pool2d "
    "max_pool2d square logsigmoid cross_entropy_loss nll_loss nll_loss_nd"
)
"""cross_entropy_loss saves log probabilities, as large as its logits."""
_MASK = _names("dropout native_dropout feature_dropout alpha_dropout")
"""Save a mask: one byte per element on CUDA, as large as the output on a CPU. The latter is counted."""
_RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
"""Save the gates of each step and layer: twice the output's size for each weight and bias."""
_ITEM = {"float64": 8, "complex64": 8, "complex128": 16, "float32": 4, "float16": 2, "bfloat16": 2}


def name_of(op: Op) -> str:
    """Return the plain name of an operator: 'linear' of 'aten::linear' or 'aten::linear_.default'."""
    return _plain(op.target)


@lru_cache(maxsize=1024)
def _plain(target: str) -> str:
    name = target.replace("_operator.", "").rsplit("::", 1)[-1].split(".")[0]
    return name if name.startswith("__") else name.removesuffix("_")


class Memory:
    """Which values of a graph have memory of their own, and which are views of others."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.home = list(range(len(graph.values)))
        """For each value, the value whose memory it uses."""
        self.view = [False] * len(graph.ops)
        """For each op, whether it is a view: its forward moves no data."""
        self.part = [False] * len(graph.ops)
        """For each op, whether it is a view of a part: its backward fills a gradient of the whole."""
        self.made: list[Size] = [_sum(graph.values[value].bytes for value in op.outputs) for op in graph.ops]
        """Bytes that each op writes; an op with several outputs includes those that getitem takes out."""
        spread = [False] * len(graph.values)
        for number, op in enumerate(graph.ops):
            name, (source, *_) = name_of(op), (op.inputs or (None,))
            if name == "getitem" and source is not None:
                maker = graph.values[source].producer
                if maker >= 0 and not self.view[maker]:
                    self.made[maker] += self.made[number]
                self.part[number] = maker >= 0 and self.part[maker]
                self._see(number, op, source, spread, other_order=self.part[number])
            elif source is None or not (name in _VIEWS or self._converts_nothing(op, name)):
                continue
            elif not (name in _RESHAPES and spread[source]):
                self.part[number] = name in _PARTS
                self._see(number, op, source, spread, other_order=name in _SPREAD | _PARTS)

    def _converts_nothing(self, op: Op, name: str) -> bool:
        """Whether a dtype conversion returns its input."""
        if name not in ("to", "_to_copy", "type_as") or len(op.inputs) != 1:
            return False
        value = self.graph.values[op.inputs[0]]
        maker = self.graph.ops[value.producer].dtype if value.producer >= 0 else op.dtype
        return maker == op.dtype and value.bytes == self.graph.values[op.outputs[0]].bytes

    def _see(self, number: int, op: Op, source: int, spread: list[bool], *, other_order: bool) -> None:
        self.view[number] = True
        for value in op.outputs:
            self.home[value] = self.home[source]
            spread[value] = spread[source] or other_order

    def kept(self, ops: Iterable[int]) -> tuple[Size, frozenset[int]]:
        """Return bytes and values that autograd saves for the backward of `ops` per microbatch, without parameters."""
        values: set[int] = set()
        more: list[Size] = []
        for number in ops:
            op = self.graph.ops[number]
            if self.view[number] or not any(self.graph.values[value].requires_grad for value in op.outputs):
                continue
            values |= {self.home[value] for value in self.named(op)}
            if name_of(op) in _MASK:
                more.append(self.made[number])
            if name_of(op) in _RECURRENT:
                more += [self.made[number]] * 2 * len(op.params)
            more.append(self.converted(op))
        sizes = [self.bytes_of(value) for value in values]
        return _sum([*sizes, *more]), frozenset(values)

    def named(self, op: Op) -> Iterable[int]:
        """Return the values that an operator saves for its backward."""
        graph, name = self.graph, name_of(op)
        graded = [value for value in op.inputs if graph.values[value].requires_grad]
        trained = any(graph.params[index].trainable for index in op.params)
        if name in _NOTHING | _MASK:
            return ()
        if name in _OTHERS:
            # For x * y with a gradient for x alone, only y is saved; the graph does not say which operand that is.
            return op.inputs if trained or len(op.inputs) > 1 else ()
        if name in _UNGRADED:
            return [value for value in op.inputs if value not in graded]
        if name in _MADE:
            return op.outputs
        return op.inputs if name in _READ else (*op.inputs, *op.outputs)

    def converted(self, op: Op) -> Size:
        """Return the bytes of the copies of parameters that autocast makes for an op and autograd saves."""
        item = _ITEM.get(op.dtype, 4)
        if name_of(op) not in PRODUCTS:
            return Size()
        params = [self.graph.params[index] for index in op.params]
        return Size(float(sum(p.bytes // p.itemsize * item for p in params if p.itemsize > item)))

    def bytes_of(self, value: int) -> Size:
        """Return the bytes of a value; for an op's tuple of outputs, those of all of them."""
        found = self.graph.values[value]
        return found.bytes if found.bytes != Size() or found.producer < 0 else self.made[found.producer]


def _sum(sizes: Iterable[Size]) -> Size:
    total = Size()
    for size in sizes:
        total += size
    return total
