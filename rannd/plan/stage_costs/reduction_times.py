"""Times to reduce the gradients of every possible stage, and to gather its parameters."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.intervals import Intervals, of_runs
from rannd.plan.topology import Counts, Machine, Mask, Table, allreduce_us
from rannd.plan.zero import reduced_part

_What = Literal["gradients", "last bucket", "parameters"]
_REDUCED: tuple[_What, _What] = ("gradients", "last bucket")


class Reductions:
    """Times to reduce the gradients of every possible stage: the same for all variants.

    Parameters that other stages read, too, are reduced over all stages that read them; as a bound, over all ranks here.
    Tables are made as they are asked for, and kept: for stages that end at one block and some numbers of replicas.
    """

    def __init__(self, intervals: Intervals, machine: Machine) -> None:
        self._runs, shared = intervals.runs, intervals.reduced.shared
        own = intervals.reduced.whole - shared
        self._bytes: dict[_What, Table] = {
            "gradients": own,
            "last bucket": np.minimum(own, BUCKET),
            "parameters": intervals.trainable.whole - intervals.trainable.shared,
        }
        self._links = [machine.between, machine.link] if machine.several else [machine.link]
        self._known: dict[tuple[_What, int, int, bytes], Table] = {}
        self._least: dict[bytes, tuple[Table, Table, Table]] = {}
        self._shared, self._shared_bucket = (
            allreduce_us(self._links[0], size, machine.world) for size in (shared, np.minimum(shared, BUCKET))
        )

    def of(self, end: int, replicas: Counts, inside: Mask | None, zero: int) -> tuple[Table, Table]:
        """Return times of the reduction and its last bucket for stages that end at `end`: ``[start, number of
        replicas]``.

        `inside`: whether the replicas are on one node, by their number; None: they count as on different nodes if there
        are several. With ZeRO 2 and 3 own gradients are only reduce-scattered, half of an all-reduce.
        """
        part = reduced_part(zero)
        whole, tail = (self._at(what, end, replicas, inside) for what in _REDUCED)
        if part < 1:
            whole, tail = whole * part, tail * part
        whole = whole + self._shared[:end, end, None]
        return whole, np.maximum(tail, self._shared_bucket[:end, end, None])

    def gather(self, end: int, replicas: Counts, inside: Mask | None) -> Table:
        """Return the time to gather own parameters, or to scatter their gradients: half of an all-reduce."""
        return self._at("parameters", end, replicas, inside) * 0.5

    def _at(self, what: _What, end: int, replicas: Counts, inside: Mask | None) -> Table:
        far = self._over(what, end, replicas, 0)
        if inside is None or len(self._links) == 1:
            return far
        return np.where(inside, self._over(what, end, replicas, 1), far)

    def _over(self, what: _What, end: int, replicas: Counts, link: int) -> Table:
        key = what, end, link, replicas.tobytes()
        if key not in self._known:
            self._known[key] = allreduce_us(self._links[link], self._bytes[what][:end, end, None], replicas)
        return self._known[key]

    def least(self, replicas: Counts, zero: int) -> tuple[Table, Table, Table]:
        """Return lower bounds of reduction, last bucket, gathering for any placement: ``[stage, number of replicas]``,
        for all stages (`Intervals.runs`). None falls with the number of replicas."""
        key = replicas.tobytes()
        if key not in self._least:
            own, bucket, values = (
                np.minimum.reduce([allreduce_us(link, own, replicas) for link in self._links])
                for own in (of_runs(size, self._runs)[:, None] for size in self._bytes.values())
            )
            self._least[key] = own, bucket, values
        own, bucket, values = self._least[key]
        part = reduced_part(zero)
        shared, shared_bucket = (of_runs(each, self._runs)[:, None] for each in (self._shared, self._shared_bucket))
        return own * part + shared, np.maximum(bucket * part, shared_bucket), values * 0.5
