"""Which operators' gradients of parameters a schedule may delay, and what that keeps in memory.

No torch in this file: it goes by the names of operators, `rannd.graph.weight_gradients` by what they are. Between the
two halves of a backward the inputs of these operators stay, and the gradients of their outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rannd.graph.fx.ir import Size, TaskGraph
from rannd.profile.kept_values import Memory, name_of

SEPARATE = frozenset({
    "linear", "mm", "matmul", "addmm", "embedding", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
"""Operators whose backward comes in two halves if they read their weight as it is."""


def separable(graph: TaskGraph) -> frozenset[int]:
    """Numbers of the operators whose gradients of parameters may be delayed.

    All that read the same trained parameter separate, or none does.
    """
    read = [[index for index in op.params if graph.params[index].trainable] for op in graph.ops]
    found = {
        number for number, op in enumerate(graph.ops)
        if read[number] and name_of(op) in SEPARATE and any(graph.values[value].requires_grad for value in op.outputs)
    }  # fmt: skip
    while True:
        whole = {index for number, indices in enumerate(read) if number not in found for index in indices}
        left = {number for number in found if whole.isdisjoint(read[number])}
        if left == found:
            return frozenset(found)
        found = left


def delayed_bytes(memory: Memory, ops: Iterable[int], delayed: Collection[int]) -> Size:
    """Return the bytes that wait for the second half of a backward of `ops` per microbatch; `delayed`: `separable`."""
    mine = [number for number in ops if number in delayed]
    homes = {memory.home[value] for number in mine for value in memory.graph.ops[number].inputs}
    total = Size()
    for size in (*(memory.bytes_of(home) for home in homes), *(memory.made[number] for number in mine)):
        total += size
    return total
