"""Parts of a large job that do the same: each needs to be simulated once.

Where all numbers of replicas are multiples of g, a job of W ranks falls into g blocks that never talk to each other but
to reduce (`Layout.pipelines`): the first of g parts of each stage's replicas runs all pieces of the first W / g ranks.
Only the ranks themselves, who give inputs and take outputs, may have their slots in other blocks::

    4 ranks, stages (0 2) (1 3)      slots 0 1 run the pieces of ranks 0 1, slots 2 3 those of ranks 2 3
             stages (0 1) (2 3)      slots 0 2 run the pieces of ranks 0 1, slots 1 3 those of ranks 2 3

Blocks are alike where ranks have the same place in them, or none, and where slots lie alike on nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from rannd.plan.schedule.program import Layout


class LayoutPart(Layout, frozen=True, dict=True):
    """A part of a job, with slots of its own numbers; what the job ties is left out, as reductions cross blocks."""

    ranks: tuple[int, ...] = ()
    """Slot of each rank; from `world` on: slots that do nothing else here."""

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
    """A block, and where the job has it."""

    block: LayoutPart
    nodes: tuple[int, ...]
    """Node of each slot of the block, numbered from 0; empty where all of the job are on one."""
    places: tuple[tuple[int, ...], ...]
    """For each time that the job has this block, the job's slots, in the order of the block's."""


def repeats(layout: Layout, nodes: Sequence[int]) -> list[Repeat]:
    """The blocks that `layout` consists of, equal ones together. `nodes`: of each slot; empty where all are on one."""
    count = layout.pipelines
    size = layout.world // count
    parts = [len(slots) // count for slots in layout.stages]
    found: dict[tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]]] = {}
    for number in range(count):
        own = [slots[number * part : (number + 1) * part] for slots, part in zip(layout.stages, parts, strict=True)]
        local = {slot: index for index, slot in enumerate(sorted(slot for slots in own for slot in slots))}
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
