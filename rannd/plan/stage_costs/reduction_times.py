"""Times to reduce the gradients of every possible stage, and to gather its parameters."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.intervals import Intervals, of_runs
from rannd.plan.topology import Counts, Machine, Mask, Table, allreduce_us, reduction_us
from rannd.plan.zero import reduced_part
from rannd.profile.costs import LinkCost

_What = Literal["gradients", "last bucket", "parameters", "host"]


class ReductionTimes(NamedTuple):
    """Times to reduce gradients of stages: tables of one shape."""

    whole: Table
    """All of them, beside computing,"""
    tail: Table
    """and the last bucket."""
    host: Table
    """Of the ranks' processors, for all of them: nothing computes meanwhile."""


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
            "host": own,
        }
        self._links = [machine.between, machine.link] if machine.several else [machine.link]
        self._known: dict[tuple[_What, int, int, bytes], Table] = {}
        self._least: dict[bytes, tuple[ReductionTimes, Table]] = {}
        whole, host = reduction_us(self._links[0], shared, machine.world)
        self._shared = ReductionTimes(
            whole, reduction_us(self._links[0], np.minimum(shared, BUCKET), machine.world)[0], host
        )

    def of(self, end: int, replicas: Counts, inside: Mask | None, zero: int) -> ReductionTimes:
        """Return times of the reduction for stages that end at `end`: ``[start, number of replicas]``.

        `inside`: whether the replicas are on one node, by their number; None: they count as on different nodes if there
        are several. With ZeRO 2 and 3 own gradients are only reduce-scattered, half of an all-reduce.
        """
        own = ReductionTimes(
            self._at("gradients", end, replicas, inside),
            self._at("last bucket", end, replicas, inside),
            self._at("host", end, replicas, inside),
        )
        return _together(own, ReductionTimes(*(each[:end, end, None] for each in self._shared)), zero)

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
            self._known[key] = _time(what, self._links[link], self._bytes[what][:end, end, None], replicas)
        return self._known[key]

    def least(self, replicas: Counts, zero: int) -> tuple[ReductionTimes, Table]:
        """Return lower bounds of reduction and gathering for any placement: ``[stage, number of replicas]``, for all
        stages (`Intervals.runs`). None falls with the number of replicas."""
        key = replicas.tobytes()
        if key not in self._least:
            sizes = {what: of_runs(size, self._runs)[:, None] for what, size in self._bytes.items()}
            found = {
                what: np.minimum.reduce([_time(what, link, size, replicas) for link in self._links])
                for what, size in sizes.items()
            }
            own = ReductionTimes(found["gradients"], found["last bucket"], found["host"])
            self._least[key] = own, found["parameters"] * 0.5
        least, values = self._least[key]
        return _together(
            least, ReductionTimes(*(of_runs(each, self._runs)[:, None] for each in self._shared)), zero
        ), values


def _time(what: _What, link: LinkCost, nbytes: Table, replicas: Counts) -> Table:
    if link.allreduce_host_us and what != "parameters":
        return reduction_us(link, nbytes, replicas)[what == "host"]
    return np.zeros((*nbytes.shape[:-1], len(replicas))) if what == "host" else allreduce_us(link, nbytes, replicas)


def _together(own: ReductionTimes, shared: ReductionTimes, zero: int) -> ReductionTimes:
    """Return the reduction of a stage's own gradients, of which `zero` may reduce a part, and of those it shares."""
    part = reduced_part(zero)
    if part < 1:
        own = ReductionTimes(*(each * part for each in own))
    return ReductionTimes(own.whole + shared.whole, np.maximum(own.tail, shared.tail), own.host + shared.host)
