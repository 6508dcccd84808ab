"""Lower bounds of what stages take, for several variants at once: the tables that bounds of the search are made of.

Small tables take as long to call as to compute, so the variants that differ in their microbatches only are computed
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rannd.plan.stage_costs.intervals import Runs, of_runs
from rannd.plan.stage_costs.microbatch_counts import MicrobatchCounts
from rannd.plan.stage_costs.shared_tables import ROUNDING
from rannd.plan.stage_costs.stage_memory import StageMemory
from rannd.plan.stage_costs.stage_terms import StageTerms
from rannd.plan.topology import Counts, Mask, Table
from rannd.plan.zero import fetch_us


class LeastTerms:
    """Lower bounds for all possible stages of variants that differ in their microbatches only.

    Args:
        tables: The variants, one for all orders of slots.
    """

    def __init__(self, tables: Sequence[StageTerms]) -> None:
        self.tables, first = tables, tables[0]
        microbatches = tuple(table.variant.microbatches for table in tables)
        rows = tuple(table.rows for table in tables)
        self.times = first.shared.least_times(first.variant.schedule, microbatches, rows)
        self.runs = first.intervals.runs
        """All stages."""
        self.world, self.blocks, self.replicas = first.world, first.blocks, first.replicas
        self._first = first
        zero, schedule = first.variant.zero, first.variant.schedule
        own, delays = self.times.microbatches[:, None, None], self.times.waits > 0
        self.counts = MicrobatchCounts(self.world, schedule, own, self.replicas, delays)
        state = first.state
        self._memory = StageMemory(self.times.rows, state, self.counts, first.options, zero=zero, delays=delays)

    @cached_property
    def _full(self) -> Mask:
        """Which stages might not fit without recomputing, whatever their replicas: ``[variant, stage]``."""
        return of_runs(self._memory.most(), self.runs) > self._first.limit * (1 - ROUNDING)

    @property
    def tight(self) -> bool:
        """Whether some stage might not fit without recomputing."""
        return bool(self._full.any())

    def alone(self) -> list[float]:
        """Return by variant a lower bound of E of a single stage on all devices; infinite if it does not fit."""
        sizes = self._memory.at_least(Runs.of(np.array([0]), np.array([self.blocks]), self.blocks))
        plain, again = (size[:, 0, -1] <= self._limit for size in sizes)
        least = np.where(plain, self.times.alone[0], np.where(again, self.times.alone[1], np.inf))
        found: list[float] = least.tolist()
        return found

    @property
    def _limit(self) -> float:
        return self._first.limit * (1 + ROUNDING)

    def _forced(self) -> Mask:
        """Whether stages recompute all blocks because that was asked for, by their ends."""
        return np.where(self.runs.ends < self.blocks, self._first.forced(0), self._first.forced(self.blocks))

    def fewest(self, close: bool) -> tuple[Counts, Counts]:
        """Return lower bounds for the replicas of a stage without and with recomputing, for any later stages.

        ``[variant, stage]``: places of numbers of replicas; behind the last one if the stage is not possible, or is a
        plan of its own. `close`: see `StageMemory.at_least`.
        """
        number, runs = len(self.replicas), self.runs
        fixed = of_runs(self._memory.state.fixed, runs, behind=1)
        plain, again = (fixed <= self._limit - each for each in self._memory.beside_fixed(runs, close=close))
        plain &= ~self._forced()[:, None]
        allowed, found = of_runs(self._first.allowed, runs), []
        for fits in (plain, again):
            # With more replicas a stage needs no more memory.
            first = fits.argmax(axis=-1) if fits.shape[-1] > 1 else 0  # of one number numpy takes as long
            places = np.where(allowed & fits[..., -1], first, number)
            if self.replicas[-1] == self.world:
                whole = places[:, self.blocks - 1]  # the stage of all blocks
                whole[whole == number - 1] = number
            found.append(places)
        return found[0], found[1]

    def fitting(self, stages: int) -> tuple[Mask, Mask]:
        """Return which stages fit without and with recomputing, if all have the same number of replicas.

        ``[variant, number of earlier stages, stage]``. At least these: some may not fit.

        Args:
            stages: Number of stages of a plan.
        """
        later = np.arange(stages - 1, -1, -1) * int(self.replicas[0])
        flying = [self.counts.most(self.blocks, int(used), split=False)[0, ..., :1] for used in later]
        sizes = self._memory.keeping(np.concatenate(flying, axis=1), self.runs)
        plain, again = (size <= self._limit for size in sizes)
        allowed = of_runs(self._first.allowed, self.runs)
        return plain & ~self._forced() & allowed, again & allowed

    def exposed(self, variants: Counts) -> Table:
        """Lower bounds of the exposed reduction of stages, for any later stages and any placement.

        ``[variant, stage, number of replicas]``, for the variants at these places. None falls with the number of
        replicas.
        """
        tables, zero, runs = self._first, self._first.variant.zero, self.runs
        (whole, tail, host), gather = tables.reductions.least(self.replicas, zero)
        # If a backward waits for gradients to be scattered, only their last bucket may be left.
        found = tail[None]
        if tables.options.sync_allreduce:
            found = whole[None]
        elif zero < 2:
            rows, memory = self.times.rows, self._memory
            again = self._forced() | self._full[variants]
            more = rows.forward_us[variants] + fetch_us(memory.read_back[variants], tables.options.device)
            hiding = of_runs(rows.backward_us[variants], runs) + np.where(again, of_runs(more, runs), 0.0)
            found = np.maximum(whole - hiding[..., None], tail)
        found = found + host + gather if zero in (1, 2) else found + host
        return np.broadcast_to(found, (len(variants), *found.shape[1:]))


def families(tables: Sequence[StageTerms]) -> list[tuple[LeastTerms, int]]:
    """Return for each variant the bounds of those that differ in microbatches or order of slots only, and its place."""
    found: dict[tuple[str, int, bytes], dict[int, StageTerms]] = defaultdict(dict)
    keys = []
    for table in tables:
        key = table.variant.schedule, table.variant.zero, table.replicas.tobytes()
        found[key].setdefault(table.variant.microbatches, table)
        keys.append(key)
    made = {key: LeastTerms(list(family.values())) for key, family in found.items()}
    places = {key: {count: place for place, count in enumerate(family)} for key, family in found.items()}
    return [(made[key], places[key][table.variant.microbatches]) for key, table in zip(keys, tables, strict=True)]
