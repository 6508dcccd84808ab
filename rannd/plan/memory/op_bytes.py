"""What each operator of a graph saves for its backward, and what it has beside its operands while it runs.

By the names of operators, as `rannd.profile.kept_values`. Where costs of blocks were measured, what a block really
saves replaces the sum of the names (`SavedBytes.excess`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rannd.graph.fx.ir import Op, TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.profile.costs import BlockCost
from rannd.profile.delayed_gradients import separable
from rannd.profile.kept_values import ATTENTION, SUMS, Memory, name_of

_LOSSES = frozenset({"cross_entropy_loss"})
"""Have a second value as large as their input in forward and backward: log probabilities, and their gradient."""
_CONVOLUTIONS = frozenset({
    "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
"""Libraries copy their operands and results to other orders of dimensions."""
_PLAIN = frozenset({
    "linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "add", "sub", "mul", "neg", "rsub", "relu", "gelu", "silu",
    "tanh", "sigmoid", "exp", "layer_norm", "embedding", "cat", "stack", "sum", "mean", "softmax", "log_softmax",
    "dropout", "where", "clone", "to", "_to_copy", "batch_norm", "native_batch_norm", "max_pool2d",
    "max_pool2d_with_indices",
})  # fmt: skip
"""Have nothing but their operands, their results and the gradients of these: others may make values in between."""
_IN_PLACE = frozenset({"linear", "mm", "addmm", "matmul"})
"""The second half of their backward adds to gradients of parameters without another one beside."""
_NORMALISED = frozenset({"batch_norm", "native_batch_norm", "_native_batch_norm_legit"})
"""Write buffers, of which each microbatch has a copy."""


class OpBytes:
    """Bytes of the operators of one graph, for microbatches of `rows` rows."""

    def __init__(self, graph: TaskGraph, rows: int) -> None:
        self.graph, self.rows = graph, rows
        self.memory = memory = Memory(graph)
        self.home = memory.home
        self.separable = separable(graph)
        self.size = [max(value.bytes.at(rows), 0.0) for value in graph.values]
        """Of each value as gradients have it: a view has its own size."""
        self.whole = [max(memory.bytes_of(number).at(rows), 0.0) for number in range(len(graph.values))]
        """Of the memory of each value that is no view."""
        self.graded = [value.requires_grad for value in graph.values]
        """Which values get gradients; a tuple of values does if one of them does."""
        for op in graph.ops:
            if name_of(op) == "getitem" and op.inputs and any(self.graded[value] for value in op.outputs):
                self.graded[op.inputs[0]] = True
        self.tuples = {op.inputs[0] for op in graph.ops if name_of(op) == "getitem" and op.inputs}
        self.names = [name_of(op) for op in graph.ops]

    def trained(self, number: int) -> list[int]:
        """Parameters whose gradients the backward of an op computes."""
        return [index for index in self.graph.ops[number].params if self.graph.params[index].trainable]

    def differentiable(self, number: int) -> bool:
        """Whether an op has a backward."""
        return any(self.graded[value] for value in self.graph.ops[number].outputs)

    def made(self, number: int) -> float:
        """Bytes of the results of an op."""
        return max(self.memory.made[number].at(self.rows), 0.0)

    def passes(self, number: int, value: int) -> bool:
        """Whether the gradient of an input is that of the output, in the same memory."""
        name, op = self.names[number], self.graph.ops[number]
        if name == "getitem":
            return True
        if self.memory.view[number]:
            return not self.memory.part[number] and self.size[value] == sum(self.size[made] for made in op.outputs)
        return name in SUMS and self.size[value] == sum(self.size[made] for made in op.outputs)

    def beside(self, number: int, *, backward: bool) -> float:
        """Bytes that an op has in addition to operands, results and their gradients."""
        op, name = self.graph.ops[number], self.names[number]
        if self.memory.view[number] or name in _PLAIN:
            return max(self.memory.converted(op).at(self.rows), 0.0) if backward else 0.0
        read, made = sum(self.size[value] for value in op.inputs), self.made(number)
        if name in _LOSSES:
            return read
        if name in _CONVOLUTIONS:
            return made + read + 2.0 * self._params(op)
        if name == ATTENTION:
            return read if backward else 0.0
        largest = max((self.size[value] for value in (*op.inputs, *op.outputs)), default=0.0)
        return (2.0 if backward else 1.0) * largest

    def _params(self, op: Op) -> float:
        return float(sum(self.graph.params[index].bytes for index in op.params))

    def written(self, number: int) -> float:
        """Bytes of the buffers that an op writes."""
        if self.names[number] not in _NORMALISED:
            return 0.0
        params = [self.graph.params[index] for index in self.graph.ops[number].params]
        return float(sum(param.bytes for param in params if param.buffer))

    def adds_in_place(self, number: int) -> bool:
        """Whether the second half of its backward adds to what is there of gradients of parameters."""
        return self.names[number] in _IN_PLACE


class SavedBytes:
    """What operators save for their backward.

    Args:
        of: The operators.
        blocks: All blocks of the graph.
        costs: Their costs.
    """

    def __init__(self, of: OpBytes, blocks: Sequence[Block], costs: Sequence[BlockCost]) -> None:
        graph, memory = of.graph, of.memory
        self.block_of = {op: number for number, block in enumerate(blocks) for op in block.ops}
        readers: dict[int, set[int]] = defaultdict(set)
        for index, op in enumerate(graph.ops):
            for value in (*op.inputs, *op.outputs):
                readers[of.home[value]].add(self.block_of[index])
        self.homes: list[set[int]] = [set() for _ in graph.ops]
        """Values, by the one whose memory they use, that each operator saves."""
        self.more = [0.0] * len(graph.ops)
        """What else each saves: masks, copies of parameters in another type."""
        self.excess = [0.0] * len(blocks)
        """What each block was measured to save more than that."""
        self.inner = [0.0] * len(blocks)
        """What blocks save by names and no other block reads."""
        self.alone: list[set[int]] = [set() for _ in blocks]
        """Those values."""
        for number, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
            crossing = {memory.home[value] for value in cost.kept}
            named: set[int] = set()
            more = 0.0
            for index in block.ops:
                op = graph.ops[index]
                if memory.view[index] or not of.differentiable(index):
                    continue
                size, found = memory.kept([index])
                found = frozenset(home for home in found if home in crossing or len(readers[home]) == 1)
                by_name = sum(memory.bytes_of(home).at(of.rows) for home in memory.kept([index])[1])
                self.homes[index] = set(found)
                self.more[index] = max(size.at(of.rows) - by_name, 0.0)
                named |= found
                more += self.more[index]
            for home in crossing - named:  # nobody knows which operator saves it: the last one that lets go of it
                touching = [
                    index for index in block.ops if home in {of.home[value] for value in graph.ops[index].inputs}
                ]
                first = min(touching or block.ops)
                self.homes[first].add(home)
            self.alone[number] = {home for home in named if len(readers[home]) == 1}
            self.inner[number] = sum(of.whole[home] for home in self.alone[number]) + more
            saved = max(cost.activation_bytes.at(of.rows), 0.0)
            self.excess[number] = max(saved - sum(of.whole[home] for home in crossing - self.alone[number]), 0.0)
            self.excess[number] -= self.inner[number]
