"""Plans worth a simulation: what people would ask about, beside the one with the least E."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from rannd.plan.run_modes import RunMode
from rannd.plan.search.estimate import StageTables
from rannd.plan.search.stages import Choice, best_choice, e_of
from rannd.plan.topology import Mask

EFFORT = 20_000
"""Of the search for each of them."""
MOST = 9
"""Numbers of stages that are looked at."""

MakeTables = Callable[[Mask, float, bool], list[StageTables]]
"""Tables of all variants for the replicas that are allowed, bytes of a device, and recomputing everywhere."""


class Candidate(msgspec.Struct, frozen=True):
    """A plan, and what is to be said of it."""

    choice: Choice
    table: StageTables
    most_bytes: int
    """What the fullest device needs."""
    over_bytes: int = 0
    """By how much that is too much."""

    runs: bool = True
    """Whether the runtime can run it."""

    @property
    def name(self) -> str:
        """As '4-way data parallel' or '2 stages x 2, 8 microbatches, ZeRO 1'."""
        replicas, variant = self.choice.replicas, self.choice.variant
        each = f" x {replicas[0]}" if replicas[0] > 1 else ""
        if len(set(replicas)) > 1:
            each = f" x {min(replicas)} to {max(replicas)}"
        pieces = f"{variant.microbatches} microbatch{'es' if variant.microbatches > 1 else ''}"
        plan = f"{len(replicas)} stages{each}, {pieces}"
        if len(replicas) == 1:
            plan = f"{replicas[0]}-way data parallel"
        return ", ".join(filter(None, (plan, RunMode(variant.schedule, variant.zero).name)))


def candidate(choice: Choice, tables: Sequence[StageTables], over: float | None = None) -> Candidate:
    """What `choice` needs; `over`: the bytes of a device, where it needs more."""
    table = next(table for table in tables if table.variant == choice.variant)
    sizes = [
        table.estimate(start, end, replicas, used=used).total_bytes
        for start, end, replicas, used in choice.spans(table.blocks)
    ]
    most = max(sizes)
    return Candidate(choice, table, most, 0 if over is None else max(math.ceil(most - over), 1))


def candidates(make: MakeTables, allowed: Mask, limit: float, sizes: Sequence[int], stages: int) -> Iterator[Candidate]:
    """For 1, 2, 3 .. stages with equally many replicas: the least E, and the most even split in every variant.

    `allowed`: ``[start, end, replicas - 1]``; `sizes`: operators of each block; `stages`: their number, 0 where it is
    free. What does not fit comes with what it needs if all stages recompute.
    """
    world, blocks = allowed.shape[2], allowed.shape[0] - 1
    counts = [count for count in range(1, min(world, blocks) + 1) if world % count == 0]
    for count in [stages] if stages in counts else counts[:MOST] if not stages else []:
        replicas = world // count
        only = allowed & (np.arange(1, world + 1) == replicas)
        tables = make(only, limit, False)
        choice = best_choice(tables, stages=count, effort=EFFORT).choice
        if choice is not None:
            yield candidate(choice, tables)
            even = even_starts(sizes, count)
            splits = [e_of(table, even, (replicas,) * count) for table in tables] if even else []
            yield from (candidate(split, tables) for split in splits if split is not None)
            continue
        tables = make(only, math.inf, True)
        choice = best_choice(tables, stages=count, effort=EFFORT).choice
        if choice is not None:
            yield candidate(choice, tables, over=limit)


def later_candidates(
    make: Callable[[RunMode], list[StageTables]], ways: Sequence[RunMode], stages: int
) -> Iterator[Candidate]:
    """In each of the ways that cannot be run yet the plan with the least E, where one fits."""
    for way in ways:
        tables = make(way)
        choice = best_choice(tables, stages=stages, effort=EFFORT).choice
        if choice is not None:
            yield msgspec.structs.replace(candidate(choice, tables), runs=False)


def even_starts(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """First blocks of stages of equally many operators, as far as blocks of these sizes allow; () where they do not."""
    ends = np.cumsum(sizes)
    cuts = [int(np.abs(ends - ends[-1] * part / stages).argmin()) + 1 for part in range(1, stages)]
    starts = (0, *cuts)
    return starts if all(a < b for a, b in zip(starts, (*cuts, len(sizes)), strict=True)) else ()
