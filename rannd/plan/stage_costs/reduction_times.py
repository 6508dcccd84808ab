"""Times to reduce the gradients of every possible stage, and to gather its parameters."""

from __future__ import annotations

import numpy as np

from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.topology import Machine, Mask, Table, allreduce_us
from rannd.plan.zero import reduced_part


class Reductions:
    """Times to reduce the gradients of every possible stage: the same for all variants.

    Parameters that other stages read, too, are reduced over all stages that read them; as a bound, over all ranks here.
    """

    def __init__(self, intervals: Intervals, machine: Machine) -> None:
        replicas = np.arange(1, machine.world + 1)
        values = (intervals.trainable.whole - intervals.trainable.shared)[:, :, None]
        shared = intervals.reduced.shared[:, :, None]
        own = intervals.reduced.whole[:, :, None] - shared
        links = [machine.between, machine.link] if machine.several else [machine.link]
        self._values = [allreduce_us(link, values, replicas) for link in links]
        self._own = [allreduce_us(link, own, replicas) for link in links]
        self._bucket = [allreduce_us(link, np.minimum(own, BUCKET), replicas) for link in links]
        self._least: dict[int, tuple[Table, Table, Table]] = {}
        self._shared, self._shared_bucket = (
            allreduce_us(links[0], size, machine.world) for size in (shared, np.minimum(shared, BUCKET))
        )

    def of(self, end: int, inside: Mask | None, zero: int) -> tuple[Table, Table]:
        """Return times of the reduction and its last bucket for stages that end at `end`: ``[start, replicas - 1]``.

        `inside`: whether the replicas are on one node; None: they count as on different nodes if there are several.
        With ZeRO 2 and 3 own gradients are only reduce-scattered, half of an all-reduce.
        """
        part = reduced_part(zero)
        whole, bucket = (self._at(each, end, inside) * part for each in (self._own, self._bucket))
        return whole + self._shared[:end, end], np.maximum(bucket, self._shared_bucket[:end, end])

    def gather(self, end: int, inside: Mask | None) -> Table:
        """Return the time to gather own parameters, or to scatter their gradients: half of an all-reduce."""
        return self._at(self._values, end, inside) * 0.5

    def _at(self, tables: list[Table], end: int, inside: Mask | None) -> Table:
        if inside is None:
            return tables[0][:end, end]
        return np.where(inside, tables[-1][:end, end], tables[0][:end, end])

    def least(self, zero: int) -> tuple[Table, Table, Table]:
        """Return lower bounds of reduction, last bucket, gathering for any placement: ``[start, end, replicas -
        1]``."""
        if zero not in self._least:
            part = reduced_part(zero)
            own, bucket, values = (np.minimum(each[0], each[-1]) for each in (self._own, self._bucket, self._values))
            tail = np.maximum(bucket * part, self._shared_bucket)
            self._least[zero] = own * part + self._shared, tail, values * 0.5
        return self._least[zero]
