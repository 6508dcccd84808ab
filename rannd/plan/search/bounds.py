"""Lower bounds: what the stages that are still missing must add to E, whatever they are.

A stage with R replicas runs ceil(P / R) of P microbatches. If no round may take longer than T, a stage that takes t per
microbatch needs at least ceil(P / (floor(T / t) + 1)) replicas. With these minimum devices per stage, two shortest
paths over the blocks give the cost of T:

    devices(T, i) = min over k < i of devices(T, k) + replicas(T, k, i)
    rest(T, i)    = min over k < i of fill(k, i) + max(forward(0, k) + exposed(T, k, i), rest(T, k))

If devices(T, i) exceeds the devices there are, some round is longer than T. `rest` is fill plus exposed reduction,
which drains of earlier stages shorten: by less than the fill of those stages. The paths are computed for a hundred T at
once. (Bottleneck search of chains-on-chains partitioning: Pinar and Aykanat, "Fast optimal load balancing algorithms
for 1D partitioning", 2004; here with replicas and a second cost.)
"""

from __future__ import annotations

import math

import numpy as np

from rannd.plan.stage_costs.estimate import NEVER, StageTables
from rannd.plan.topology import Counts, Table

COARSE, FINE = 8, 32
"""Number of T to try: over the whole range, and close to the best plan."""


class Bounds:
    """Lower bounds for plans of two or more stages of one variant.

    Tables are ``[stages left, first blocks, ..]``; if the number of stages is free, only index 0 exists.
    """

    def __init__(self, tables: StageTables, stages: int) -> None:
        self._tables = tables
        self._tried = 0
        """Maximum number of values of T that were tried at a time."""
        self._stages = stages
        """Number of stages; 0: any."""
        self._numbers = np.append(tables.replicas, NEVER)
        self._unit = math.gcd(tables.world, *tables.replicas.tolist())
        """Devices are counted in multiples of this."""
        self._units = tables.world // self._unit
        self._pieces = tables.world * tables.variant.microbatches
        self._count = tables.blocks
        forward, fewest = tables.forward_us, tables.fewest()
        self._forward = forward[0]
        """Forward time of the first blocks."""
        self._ways = [
            (fewest[0], *self._way(tables.backward_us, tables.weight_us)),
            (fewest[1], *self._way(tables.backward_us + forward, np.zeros_like(forward))),
        ]
        """Without and with recomputing: place of the minimum replicas, round of a microbatch, fill."""
        # A stage on R of w devices runs P / R microbatches; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._units + 1) * self._unit, 1)
        work = (forward + tables.backward_us + tables.add_us - self._filled(tables.weight_us))[0]
        mean = work[:, None] * np.maximum(self._pieces - devices, 0) / devices
        mean[1:, 0] = np.inf
        self.rounds = np.repeat(mean[None], stages + 1, axis=0)
        """``[.., units of devices]``: lower bound of the longest round. Infinite without devices."""
        self.rest = np.repeat(self._ways[0][2][:1], stages + 1, axis=0)  # several stages send no less than one
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

    def _way(self, backward: Table, waits: Table) -> tuple[Table, Table]:
        """Return round per microbatch and fill of every stage, for `backward` times of which zb_h1 delays `waits`."""
        tables, microbatch = self._tables, self._tables.microbatch
        forward = tables.forward_us
        values, grads = np.minimum(*microbatch.values_us), np.minimum(*microbatch.grads_us)
        fill = forward + (backward - waits) + values + grads + microbatch.ranks_us
        fill[0] += microbatch.to_ranks + tables.agreeing_us
        backward = backward + tables.add_us
        if tables.counts.steady:
            return np.maximum(np.maximum(forward + backward, values), grads) - self._filled(waits), fill
        return np.maximum(forward, values) + np.maximum(backward, grads), fill

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
        return float(self.together[self._stages, self._count, self._units])

    def sharpen(self, below: float, number: int) -> None:
        """Tighten the tables for plans that take less than `below`, with `number` values of T, unless that was done."""
        if number <= self._tried:
            return
        self._tried = number
        place = (self._stages, self._count)
        least = max(float(self.rounds[(*place, self._units)]), 1e-6)
        most = below - float(self.rest[place])
        if not np.isfinite(most):
            most = float(self._ways[1][1].max()) * self._pieces
        if least < most:
            self._try(np.geomspace(least, most, number))

    def _try(self, limits: Table) -> None:
        # With the last limit any number of replicas may do.
        limits = np.append(limits, np.inf)
        places = [self._places(fewest, piece_us, limits) for fewest, piece_us, _ in self._ways]
        plain, again = (each[2][:, :, None] for each in self._ways)
        fill = np.where(places[0] < len(self._tables.replicas), plain, again)
        devices, rest = self._paths(np.minimum(*places), fill)
        np.maximum(self.rest, rest[-1], out=self.rest)
        limits, devices, rest = limits[:-1], devices[:-1], rest[:-1]
        free = np.arange(self._units + 1) * self._unit
        lower = np.append(0.0, limits)[:, None]
        ends = np.arange(self._count + 1)[:, None]
        for left in range(self._stages + 1):
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

    def _paths(self, places: Counts, fill: Table) -> tuple[Counts, Table]:
        """Return ``[limit, stages left, end]``: minimum devices for the first blocks, and minimum fill plus reduction.

        `places` (of numbers of replicas), `fill`: ``[start, end, limit]``, of a stage.
        """
        replicas = self._numbers[places]
        exposed = self._tables.exposed_at_least(np.minimum(places, len(self._tables.replicas) - 1))
        count, number, stages = self._count, places.shape[2], self._stages
        devices = np.full((stages + 1, count + 1, number), NEVER, dtype=np.int64)
        rest = np.full((stages + 1, count + 1, number), np.inf)
        devices[0, 0] = 0
        rest[0, 0] = 0.0
        fill = np.where(replicas < NEVER, fill, np.inf)
        left_over = self._forward[:, None, None] + exposed
        for left in range(min(stages, 1), stages + 1):
            before = max(left - 1, 0)
            for start in range(count):
                more = devices[before, start] + replicas[start, start + 1 :]
                np.minimum(devices[left, start + 1 :], more, out=devices[left, start + 1 :])
                after = np.maximum(left_over[start, start + 1 :], rest[before, start])
                after += fill[start, start + 1 :]
                np.minimum(rest[left, start + 1 :], after, out=rest[left, start + 1 :])
        return np.moveaxis(devices, -1, 0), np.moveaxis(rest, -1, 0)
