"""Parts of a large job that do the same: each needs to be simulated once.

Where all numbers of replicas are multiples of g, a job of W slots falls into g blocks of W / g ranks that never talk to
each other but to reduce: a replica takes ranks in order, so the first of g parts of each stage's replicas runs all
pieces of the first of g parts of the ranks. If these parts also lie on the same slots, block i is block 0 with i W / g
added to every slot, and its Program is that of a job of W / g slots::

    4 slots, stages (0 2) (1 3)      slots 0 1 run the pieces of ranks 0 1, slots 2 3 those of ranks 2 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rannd.plan.program import Layout


class Repeat(msgspec.Struct, frozen=True):
    """A layout that a job repeats."""

    layout: Layout
    """Of one block. What it ties is left out: reductions cross blocks."""
    nodes: tuple[int, ...]
    """Node of each slot of the block, numbered from 0; empty where all are on one."""
    starts: tuple[int, ...]
    """First slot of each block that does this."""


def repeats(layout: Layout, nodes: Sequence[int]) -> list[Repeat]:
    """The blocks that `layout` consists of, equal ones together. `nodes`: of each slot; empty where all are on one.

    One block, all of the job, where it does not repeat itself.
    """
    count = _count(layout)
    size = layout.world // count
    block = Layout(
        size,
        layout.microbatches,
        tuple(slots[: len(slots) // count] for slots in layout.stages),
        layout.edges,
        layout.grad_edges,
    )
    kinds: dict[tuple[int, ...], list[int]] = {}
    for start in range(0, layout.world, size):
        numbers: dict[int, int] = {}
        kinds.setdefault(
            tuple(numbers.setdefault(node, len(numbers)) for node in nodes[start : start + size]), []
        ).append(start)
    return [Repeat(block, kind, tuple(starts)) for kind, starts in kinds.items()]


def _count(layout: Layout) -> int:
    """The most blocks that the layout divides into."""
    most = math.gcd(*map(len, layout.stages))
    for count in sorted((each for each in range(1, most + 1) if most % each == 0), reverse=True):
        size = layout.world // count
        if all(
            slot == slots[place % (len(slots) // count)] + place // (len(slots) // count) * size
            for slots in layout.stages
            for place, slot in enumerate(slots)
        ):
            return count
    return 1
