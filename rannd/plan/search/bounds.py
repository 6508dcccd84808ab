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

from functools import cached_property

import numpy as np
import numpy.typing as npt

from rannd.plan.stage_costs.estimate import NEVER, StageTables
from rannd.plan.topology import Table

COARSE, FINE = 24, 64
"""Number of T to try: over the whole range, and close to the best plan."""


class Bounds:
    """Lower bounds for plans of two or more stages of one variant.

    Tables are ``[stages left, first blocks, ..]``; if the number of stages is free, only index 0 exists.
    """

    def __init__(self, tables: StageTables, stages: int) -> None:
        self._tables = tables
        self._stages = stages
        """Number of stages; 0: any."""
        self._world = tables.world
        self._pieces = tables.world * tables.variant.microbatches
        count = self._count = tables.blocks
        self._next = tables.next_allowed()
        forward, fewest = tables.forward_us, tables.fewest()
        self._forward = forward[0]
        """Forward time of the first blocks."""
        self._ways = [
            (fewest[0], *self._way(tables.backward_us, tables.weight_us)),
            (fewest[1], *self._way(tables.backward_us + forward, np.zeros_like(forward))),
        ]
        """Without and with recomputing: minimum replicas, round of a microbatch, fill."""
        # A stage on R of w devices runs P / R microbatches; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._world + 1), 1)
        work = (forward + tables.backward_us + tables.add_us - self._filled(tables.weight_us))[0]
        mean = work[:, None] * np.maximum(self._pieces - devices, 0) / devices
        mean[1:, 0] = np.inf
        self.rounds = np.repeat(mean[None], stages + 1, axis=0)
        """``[.., devices]``: lower bound of the longest round. Infinite without devices."""
        self._any = np.where(np.minimum(*fewest) < NEVER, 1, NEVER)[None]
        self._least_fill = np.where(fewest[0] < NEVER, self._ways[0][2], self._ways[1][2])
        self.rest = self._paths(self._any, np.zeros((1, count + 1, count + 1)), self._least_fill[None])[1][0]
        """Lower bound of fill plus exposed reduction."""
        self.together = self.rest[:, :, None] + self.rounds
        """``[.., devices]``: lower bound of fill, reduction and longest round together, if no stage follows."""

    def _filled(self, waits: Table) -> Table:
        """Return how much delayed parameter gradients shorten a round at most: those of one in `microbatches`."""
        result: Table = np.minimum(waits, self._tables.forward_us) / self._tables.variant.microbatches
        return result

    def _way(self, backward: Table, waits: Table) -> tuple[Table, Table]:
        """Return round per microbatch and fill of every stage, for `backward` times of which zb_h1 delays `waits`."""
        tables = self._tables
        forward = tables.forward_us
        values, grads = np.minimum(*tables.values_us), np.minimum(*tables.grads_us)
        fill = forward + (backward - waits) + values + grads + tables.ranks_us
        fill[0] += tables.to_ranks + tables.agreeing_us
        backward = backward + tables.add_us
        if tables.counts.steady:
            return np.maximum(np.maximum(forward + backward, values), grads) - self._filled(waits), fill
        return np.maximum(forward, values) + np.maximum(backward, grads), fill

    def of(self, left: int, end: int, devices: int) -> tuple[Table, Table, Table, Table]:
        """Return bounds for what is missing before a stage that ends at `end`; it and the missing ones have `devices`.

        Tables ``[start, replicas - 1]`` of that stage: longest round; fill and reduction; all together; forward, which
        is not part of a drain.
        """
        rounds = self.rounds[left, :end, :devices][:, ::-1]
        return (
            rounds,
            self.rest[left, :end, None],
            self.together[left, :end, :devices][:, ::-1],
            self._forward[:end, None],
        )

    @property
    def root(self) -> float:
        """Lower bound of E for all plans."""
        return float(self.together[self._stages, self._count, self._world])

    def sharpen(self, below: float, number: int) -> None:
        """Tighten the tables for plans that take less than `below`, with `number` values of T."""
        place = (self._stages, self._count)
        least = max(float(self.rounds[(*place, self._world)]), 1e-6)
        most = below - float(self.rest[place])
        if not np.isfinite(most):
            most = float(self._ways[1][1].max()) * self._pieces
        if least < most:
            self._try(np.geomspace(least, most, number))

    def _try(self, limits: Table) -> None:
        options = []
        for fewest, piece_us, _ in self._ways:
            with np.errstate(divide="ignore", invalid="ignore"):
                pieces = np.floor(limits[:, None, None] / piece_us * (1 + 1e-12) + 1e-12) + 1
            pieces = np.where(piece_us > 0, np.minimum(pieces, self._pieces), self._pieces)
            needed = np.ceil(self._pieces / pieces).astype(np.int64)
            options.append(np.maximum(self._next[np.minimum(needed, self._world + 1)], fewest))
        replicas = np.minimum(*options)
        fill = np.where(options[0] <= self._world, self._ways[0][2], self._ways[1][2])
        starts, ends = np.ogrid[: self._count + 1, : self._count + 1]
        exposed = self._exposed[starts, ends, np.minimum(replicas, self._world) - 1]
        devices, rest = self._paths(replicas, exposed, fill)
        any_rest = self._paths(self._any, self._exposed[None, :, :, 0], self._least_fill[None])[1][0]
        np.maximum(self.rest, any_rest, out=self.rest)
        free = np.arange(self._world + 1)
        lower = np.append(0.0, limits)[:, None]
        for left in range(self._stages + 1):
            # The devices needed fall as the limit grows: find the first limit for which there are enough.
            first = (devices[:, left, :, None] > free).sum(axis=0)
            known = np.where(first > 0, limits[np.maximum(first - 1, 0)], 0.0)
            np.maximum(self.rounds[left], known, out=self.rounds[left])
            # A longest round between two limits costs at least the lower limit, with the rest of the upper one.
            upper = np.concatenate([rest[:, left], self.rest[left][None]])
            least = np.minimum.accumulate((lower + upper)[::-1])[::-1]
            ends = np.arange(self._count + 1)[:, None]
            together = np.maximum(self.rest[left][:, None] + self.rounds[left], least[first, ends])
            together[0] = self.together[left, 0]
            np.maximum(self.together[left], together, out=self.together[left])

    @cached_property
    def _exposed(self) -> Table:
        return self._tables.exposed_at_least()

    def _paths(
        self, replicas: npt.NDArray[np.int64], exposed: Table, fill: Table
    ) -> tuple[npt.NDArray[np.int64], Table]:
        """Return ``[limit, stages left, end]``: minimum devices for the first blocks, and minimum fill plus reduction.

        `replicas`, `exposed`, `fill`: ``[limit, start, end]``, of a stage.
        """
        number, count, stages = len(replicas), self._count, self._stages
        devices = np.full((number, stages + 1, count + 1), NEVER, dtype=np.int64)
        rest = np.full((number, stages + 1, count + 1), np.inf)
        devices[:, 0, 0] = 0
        rest[:, 0, 0] = 0.0
        fill = np.where(replicas < NEVER, fill, np.inf)
        left_over = self._forward[:, None] + exposed
        for left in range(min(stages, 1), stages + 1):
            before = max(left - 1, 0)
            for end in range(1, count + 1):
                fewest = (devices[:, before, :end] + replicas[:, :end, end]).min(axis=1)
                devices[:, left, end] = np.minimum(fewest, NEVER)
                after = np.maximum(left_over[:, :end, end], rest[:, before, :end])
                rest[:, left, end] = (fill[:, :end, end] + after).min(axis=1)
        return devices, rest
