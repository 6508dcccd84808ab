"""Lower bounds: what the stages that are still missing must add to E, whatever they are.

A stage with R replicas runs ceil(P / R) of P microbatches. If no round may take longer than T, a stage that takes t per
microbatch needs at least ceil(P / (floor(T / t) + 1)) replicas. With these minimum devices per stage, two shortest
paths over the blocks give the cost of T:

    devices(T, i) = min over k < i of devices(T, k) + replicas(T, k, i)
    rest(T, i)    = min over k < i of fill(k, i) + max(forward(0, k) + exposed(T, k, i), rest(T, k))

If devices(T, i) exceeds the devices there are, some round is longer than T. `rest` is fill plus exposed reduction,
which drains of earlier stages shorten: by less than the fill of those stages. The paths are computed for some T of all
variants at once. (Bottleneck search of chains-on-chains partitioning: Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", 2004; here with replicas and a second cost.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rannd.plan.stage_costs.stage_terms import NEVER, StageTerms
from rannd.plan.topology import Counts, Table

ANY, COARSE, FINE = 1, 8, 32
"""Number of T to try: whether any plan is as good as the best one that is known; over the whole range; and close to the
best plan."""


class Bounds:
    """Lower bounds for plans of two or more stages of one variant.

    Tables are ``[stages left, first blocks, ..]``; if the number of stages is free, only index 0 exists.
    """

    def __init__(self, tables: StageTerms, stages: int) -> None:
        self._tables = tables
        self._tried = 0
        """Maximum number of values of T that were tried at a time."""
        self.stages = stages
        """Number of stages; 0: any."""
        self._numbers = np.append(tables.replicas, NEVER)
        self._unit = math.gcd(tables.world, *tables.replicas.tolist())
        """Devices are counted in multiples of this."""
        self._units = tables.world // self._unit
        self._pieces = tables.world * tables.variant.microbatches
        self._count = tables.blocks
        forward = tables.forward_us
        self._forward = forward[0]
        """Forward time of the first blocks."""
        # A stage on R of w devices runs P / R microbatches; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._units + 1) * self._unit, 1)
        work = (forward + tables.backward_us + tables.add_us - self._filled(tables.weight_us))[0]
        mean = work[:, None] * np.maximum(self._pieces - devices, 0) / devices
        mean[1:, 0] = np.inf
        self.rounds = np.repeat(mean[None], stages + 1, axis=0)
        """``[.., units of devices]``: lower bound of the longest round. Infinite without devices."""
        fill = self._fill(tables.backward_us - tables.weight_us)
        self.rest = np.repeat(fill[:1], stages + 1, axis=0)  # several stages send no less than one
        self.rest[0, 0] = 0.0
        if stages:
            self.rest[0, 1:] = self.rest[1:, 0] = np.inf
        """Lower bound of fill plus exposed reduction."""
        self.together = self.rest[:, :, None] + self.rounds
        """``[.., units of devices]``: lower bound of fill, reduction and longest round, if no stage follows."""

    def _filled(self, waits: Table) -> Table:
        """Return how much delayed parameter gradients shorten a round at most: those of one in `microbatches`."""
        result: Table = np.minimum(waits, self._tables.forward_us) / self._tables.variant.microbatches
        return result

    @cached_property
    def _ways(self) -> list[tuple[Counts, Table, Table]]:
        """Without and with recomputing: place of the minimum replicas, round of a microbatch, fill."""
        backward, waits = self._tables.backward_us, self._tables.weight_us
        again = backward + self._tables.forward_us
        plain, recomputing = self._tables.fewest()
        return [
            (plain, self._round(backward) - self._filled(waits), self._fill(backward - waits)),
            (recomputing, self._round(again), self._fill(again)),
        ]

    def _fill(self, backward: Table) -> Table:
        """Return what every stage adds to the fill, for times of the backward that fills."""
        tables, microbatch = self._tables, self._tables.microbatch
        values, grads = microbatch.nearest_us
        fill: Table = tables.forward_us + backward + values + grads + microbatch.ranks_us
        fill[0] += microbatch.to_ranks + tables.agreeing_us
        return fill

    def _round(self, backward: Table) -> Table:
        """Return the round of a microbatch of every stage, for times of the whole backward."""
        forward, backward = self._tables.forward_us, backward + self._tables.add_us
        values, grads = self._tables.microbatch.nearest_us
        if self._tables.counts.steady:
            return np.maximum(np.maximum(forward + backward, values), grads)
        result: Table = np.maximum(forward, values) + np.maximum(backward, grads)
        return result

    def of(self, left: int, end: int, devices: int) -> tuple[Table, Table, Table, Table]:
        """Return bounds for what is missing before a stage that ends at `end`; it and the missing ones have `devices`.

        Tables ``[start, number of replicas]`` of that stage: longest round; fill and reduction; all together; forward,
        which is not part of a drain.
        """
        replicas = self._tables.replicas
        after = (devices - replicas[: np.searchsorted(replicas, devices, side="right")]) // self._unit
        return (
            self.rounds[left, :end][:, after],
            self.rest[left, :end, None],
            self.together[left, :end][:, after],
            self._forward[:end, None],
        )

    @property
    def root(self) -> float:
        """Lower bound of E for all plans."""
        return float(self.together[self.stages, self._count, self._units])

    def stages_within(self, below: float, number: int) -> StagesWithin | None:
        """Return what `sharpen` tries for plans that take less than `below`, with `number` values of T.

        None if that was done, or helps nothing.
        """
        place = (self.stages, self._count)
        least = max(float(self.rounds[(*place, self._units)]), 1e-6)
        most = below - float(self.rest[place])
        if not np.isfinite(most):
            most = float(self._ways[1][1].max()) * self._pieces
        if number <= self._tried or least >= most:
            return None
        self._tried = number
        # With the last one any replicas may do.
        limits = np.append(np.geomspace(least, most, number) if number > 1 else most, np.inf)
        ways = [self._places(fewest, piece_us, limits) for fewest, piece_us, _ in self._ways]
        plain, again = (each[2][:, :, None] for each in self._ways)
        places = np.minimum(*ways)
        replicas = self._numbers[places]
        fill = np.where(ways[0] < len(self._tables.replicas), plain, again)
        fill = np.where(replicas < NEVER, fill, np.inf)
        exposed = self._tables.exposed_at_least
        if exposed.shape[2] > 1:
            exposed = np.take_along_axis(exposed, np.minimum(places, exposed.shape[2] - 1), axis=2)
        left_over = np.broadcast_to(self._forward[:, None, None] + exposed, fill.shape)
        return StagesWithin(self, limits[:-1], replicas, fill, left_over)

    def tighten(self, limits: Table, devices: Counts, rest: Table) -> None:
        """Tighten the tables with the paths of `limits`, and of any replicas last: ``[stages left, end, limit]``."""
        np.maximum(self.rest, rest[:, :, -1], out=self.rest)
        devices, rest = np.moveaxis(devices[:, :, :-1], -1, 0), np.moveaxis(rest[:, :, :-1], -1, 0)
        free = np.arange(self._units + 1) * self._unit
        lower = np.append(0.0, limits)[:, None]
        ends = np.arange(self._count + 1)[:, None]
        for left in range(self.stages + 1):
            # The devices needed fall as the limit grows: find the first limit for which there are enough.
            first = (devices[:, left, :, None] > free).sum(axis=0)
            known = np.where(first > 0, limits[np.maximum(first - 1, 0)], 0.0)
            np.maximum(self.rounds[left], known, out=self.rounds[left])
            # A longest round between two limits costs at least the lower limit, with the rest of the upper one.
            upper = np.concatenate([rest[:, left], self.rest[left][None]])
            least = np.minimum.accumulate((lower + upper)[::-1])[::-1]
            together = np.maximum(self.rest[left][:, None] + self.rounds[left], least[first, ends])
            together[0] = self.together[left, 0]
            np.maximum(self.together[left], together, out=self.together[left])

    def _places(self, fewest: Counts, piece_us: Table, limits: Table) -> Counts:
        """Return the place of the minimum replicas of stages whose rounds are within limits: ``[start, end, limit]``.

        `fewest`: place of the minimum for want of memory; `piece_us`: round of a microbatch.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            pieces = np.floor(limits / piece_us[:, :, None] * (1 + 1e-12) + 1e-12) + 1
        # A stage whose replicas have so many microbatches at most. Not a number: a round that takes no time.
        needed = np.ceil(self._pieces / np.fmin(pieces, self._pieces))
        numbers = self._tables.replicas
        found = needed > numbers[0] if len(numbers) == 1 else np.searchsorted(numbers, needed)
        result: Counts = np.maximum(found, fewest[:, :, None])
        return result


class StagesWithin(NamedTuple):
    """Stages whose rounds are within limits: ``[start, end, limit]``; any stages last."""

    bounds: Bounds
    limits: Table
    replicas: Counts
    """Minimum number; NEVER if there is no such stage."""
    fill: Table
    left_over: Table
    """Forward of the blocks before the stage, and its exposed reduction."""


def sharpen(each: Iterable[tuple[Bounds, float]], number: int) -> None:
    """Tighten bounds of one search for plans that take less than a time each, with `number` values of T."""
    tried = [found for bounds, below in each if (found := bounds.stages_within(below, number)) is not None]
    if tried:
        replicas, fill, left_over = (
            np.concatenate([getattr(found, name) for found in tried], axis=2)
            for name in ("replicas", "fill", "left_over")
        )
        devices, rest = _paths(replicas, fill, left_over, tried[0].bounds.stages)
        ends = np.cumsum([len(found.limits) + 1 for found in tried])[:-1]
        for found, some, others in zip(
            tried, np.split(devices, ends, axis=2), np.split(rest, ends, axis=2), strict=True
        ):
            found.bounds.tighten(found.limits, some, others)


def _paths(replicas: Counts, fill: Table, left_over: Table, stages: int) -> tuple[Counts, Table]:
    """Return ``[stages left, end, limit]``: minimum devices for the first blocks, and minimum fill plus reduction."""
    count, number = replicas.shape[0] - 1, replicas.shape[2]
    devices = np.full((stages + 1, count + 1, number), NEVER, dtype=np.int64)
    rest = np.full((stages + 1, count + 1, number), np.inf)
    devices[0, 0] = 0
    rest[0, 0] = 0.0
    for left in range(min(stages, 1), stages + 1):
        before = max(left - 1, 0)
        for start in range(count):
            more = devices[before, start] + replicas[start, start + 1 :]
            np.minimum(devices[left, start + 1 :], more, out=devices[left, start + 1 :])
            after = np.maximum(left_over[start, start + 1 :], rest[before, start])
            after += fill[start, start + 1 :]
            np.minimum(rest[left, start + 1 :], after, out=rest[left, start + 1 :])
    return devices, rest
