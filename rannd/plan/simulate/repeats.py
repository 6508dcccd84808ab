"""Finds identical parts of a large job, so that each is simulated only once.

If all numbers of replicas are multiples of g, a job of W ranks consists of g blocks that communicate only to reduce
gradients (`Layout.pipelines`): the first of g parts of each stage's replicas runs all microbatches of the first W / g
ranks. Only the ranks themselves, who provide inputs and receive outputs, may have their slots in other blocks::

    4 ranks, stages (0 2) (1 3)      slots 0 1 run the pieces of ranks 0 1, slots 2 3 those of ranks 2 3
             stages (0 1) (2 3)      slots 0 2 run the pieces of ranks 0 1, slots 1 3 those of ranks 2 3

Two blocks are identical if their ranks have the same slots in them, or none, and if their slots are distributed over
nodes in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from rannd.plan.schedule.program import Layout


class LayoutPart(Layout, frozen=True, dict=True):
    """A block of a job with its own slot numbers; tied stages are left out, because reductions cross blocks."""

    ranks: tuple[int, ...] = ()
    """Slot of each rank; numbers from `world` on are slots that only stand for a rank here."""

    @property
    def slot_count(self) -> int:
        return max(self.world, max(self.ranks) + 1)

    def slot_of(self, stage: int, piece: int) -> int:
        found = super().slot_of(stage, piece)
        return self.ranks[found] if stage in (-1, len(self.stages)) else found

    @cached_property
    def _slots_of(self) -> list[list[int]]:
        *found, ranks = self._by_stage()
        return [*found, [self.ranks[rank] for rank in ranks]]


class Repeat(msgspec.Struct, frozen=True):
    """A block, and the places where the job has it."""

    block: LayoutPart
    nodes: tuple[int, ...]
    """Node of each slot of the block, numbered from 0; empty if the whole job is on one node."""
    places: tuple[tuple[int, ...], ...]
    """For each occurrence of this block, the slots of the job, in the order of the block's slots."""


def repeats(layout: Layout, nodes: Sequence[int]) -> list[Repeat]:
    """Return the distinct blocks of `layout`. `nodes`: node of each slot; empty if all are on one."""
    count = layout.pipelines
    size = layout.world // count
    parts = [len(slots) // count for slots in layout.stages]
    found: dict[tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]]] = {}
    for number in range(count):
        own = [slots[number * part : (number + 1) * part] for slots, part in zip(layout.stages, parts, strict=True)]
        local = {slot: index for index, slot in enumerate(sorted({slot for slots in own for slot in slots}))}
        ranks = tuple(local.setdefault(rank, len(local)) for rank in range(number * size, (number + 1) * size))
        known: dict[int, int] = {}
        where = tuple(known.setdefault(nodes[slot], len(known)) for slot in local) if nodes else ()
        key = tuple(tuple(local[slot] for slot in slots) for slots in own), ranks, where
        found.setdefault(key, []).append(tuple(local))
    return [
        Repeat(
            LayoutPart(size, layout.microbatches, stages, layout.edges, layout.grad_edges, (), ranks),
            where,
            tuple(places),
        )
        for (stages, ranks, where), places in found.items()
    ]
