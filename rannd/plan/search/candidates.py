"""Plans to simulate beside the one with the smallest E: those that users would compare it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from rannd.plan.run_modes import preference_us
from rannd.plan.search.stages import Choice, best_choice, e_of
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Counts

EFFORT = 20_000
"""Effort of the search for each of them, see `stages.EFFORT`."""
MOST = 9
"""Maximum number of stage counts to try."""

_ROUNDING = 1e-9
"""Part of E by which sums in another order differ at most, and more."""

MakeTables = Callable[[Counts, float, bool], list[StageTables]]
"""Makes tables of all variants, from the allowed numbers of replicas, the bytes per device, and whether every stage
recomputes."""


class Candidate(msgspec.Struct, frozen=True):
    """A plan with its memory, and whether it fits."""

    choice: Choice
    table: StageTables
    over_bytes: int = 0
    """Bytes by which its memory exceeds the limit."""

    @property
    def of(self) -> tuple[Variant, tuple[int, ...], tuple[int, ...]]:
        """What the plan is: its variant, first blocks and replicas."""
        return self.choice.variant, self.choice.starts, self.choice.replicas

    @property
    def most_bytes(self) -> int:
        """Memory of the fullest device."""
        return max(
            self.table.estimate(start, end, replicas, used=used).total_bytes
            for start, end, replicas, used in self.choice.spans(self.table.blocks)
        )

    @property
    def name(self) -> str:
        """Such as '4-way data parallel' or '2 stages x 2, 8 microbatches, ZeRO 1'."""
        replicas, variant = self.choice.replicas, self.choice.variant
        each = f" x {replicas[0]}" if replicas[0] > 1 else ""
        if len(set(replicas)) > 1:
            each = f" x {min(replicas)} to {max(replicas)}"
        pieces = f"{variant.microbatches} microbatch{'es' if variant.microbatches > 1 else ''}"
        plan = f"{len(replicas)} stages{each}, {pieces}"
        if len(replicas) == 1:
            plan = f"{replicas[0]}-way data parallel"
        return f"{plan}, ZeRO {variant.zero}" if variant.zero else plan


class EvenSplit(msgspec.Struct, frozen=True):
    """Stages with about equally many operators and equally many replicas, whose E is not computed yet."""

    table: StageTables
    starts: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def of(self) -> tuple[Variant, tuple[int, ...], tuple[int, ...]]:
        """What the plan is: its variant, first blocks and replicas."""
        return self.table.variant, self.starts, self.replicas

    @property
    def least_us(self) -> float:
        """A lower bound of E as it is compared (`preference_us`): of computing alone, as if nothing recomputed."""
        table = self.table
        ends = np.array([*self.starts[1:], table.blocks])
        whole = table.forward_us + table.backward_us - table.weight_us
        pieces = int(table.counts.pieces[table.column(self.replicas[0])])
        own = whole[np.array(self.starts), ends]
        us = (float(own.sum()) + (pieces - 1) * float(own.max())) * (1 - _ROUNDING)
        return preference_us(table.variant.zero, us)

    def candidate(self) -> Candidate | None:
        """Return it with its E; None if it does not fit."""
        choice = e_of(self.table, self.starts, self.replicas)
        return candidate(choice, [self.table]) if choice is not None else None


def candidate(choice: Choice, tables: Sequence[StageTables], over: float | None = None) -> Candidate:
    """Return `choice` with its tables; `over`: the bytes per device, if it needs more."""
    table = next(table for table in tables if table.variant == choice.variant and table.has(choice.replicas))
    found = Candidate(choice, table)
    if over is None:
        return found
    return msgspec.structs.replace(found, over_bytes=max(math.ceil(found.most_bytes - over), 1))


def alike(tables: Sequence[StageTables], plan: Candidate) -> Iterator[Candidate]:
    """Yield `plan` under the schedules of `tables`, if it fits: the same stages, replicas and microbatches."""
    variant = plan.choice.variant
    for table in tables:
        if replace(table.variant, schedule=variant.schedule) == variant:
            choice = e_of(table, plan.choice.starts, plan.choice.replicas)
            if choice is not None:
                yield candidate(choice, tables)


def relieved(plan: Candidate, stage: int) -> Iterator[Candidate]:
    """Yield `plan` with as little as possible of a stage in the stage before it, and in the one after it, if it fits.

    `stage`: its number.
    """
    table, starts = plan.table, plan.choice.starts
    borders = (*starts, table.blocks)
    start, end = borders[stage : stage + 2]
    for cut, places in ((stage, range(start + 1, end)), (stage + 1, range(end - 1, start, -1))):
        if not 0 < cut < len(starts):
            continue
        before, behind = borders[cut - 1], borders[cut + 1]
        place = next((each for each in places if table.allowed[before, each] and table.allowed[each, behind]), None)
        if place is not None:
            choice = e_of(table, (*starts[:cut], place, *starts[cut + 1 :]), plan.choice.replicas)
            if choice is not None:
                yield Candidate(choice, table)


def candidates(
    make: MakeTables, allowed: Counts, world: int, limit: float, sizes: Sequence[int], stages: int
) -> Iterator[Candidate | EvenSplit]:
    """Yield plans with 1, 2, 3 .. stages with equally many replicas: smallest E, and the most even split per variant.

    If none fits, the plan with the smallest E where all stages recompute is yielded with the memory it lacks.

    Args:
        make: Makes the tables of all variants.
        allowed: Numbers of replicas that are allowed.
        world: Number of devices.
        limit: Bytes per device.
        sizes: Number of operators of each block.
        stages: Number of stages; 0: free.
    """
    counts = [count for count in range(1, min(world, len(sizes)) + 1) if world % count == 0]
    for count in [stages] if stages in counts else counts[:MOST] if not stages else []:
        replicas = world // count
        only = allowed[allowed == replicas]
        tables = make(only, limit, False)
        choice = best_choice(tables, stages=0, effort=EFFORT).choice  # with these replicas it has `count`
        if choice is not None:
            yield candidate(choice, tables)
            even = even_starts(sizes, count)
            yield from (EvenSplit(table, even, (replicas,) * count) for table in tables if even)
            continue
        tables = make(only, math.inf, True)
        choice = best_choice(tables, stages=0, effort=EFFORT).choice
        if choice is not None:
            yield candidate(choice, tables, over=limit)


def even_starts(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the first blocks of stages with about equally many operators; () if the blocks do not allow it."""
    ends = np.cumsum(sizes)
    cuts = [int(np.abs(ends - ends[-1] * part / stages).argmin()) + 1 for part in range(1, stages)]
    starts = (0, *cuts)
    return starts if all(a < b for a, b in zip(starts, (*cuts, len(sizes)), strict=True)) else ()
