"""From below: what the stages that are still missing must add to E, whatever they are.

A stage with R replicas does ceil(P / R) of P pieces. If no round may take longer than T, a stage whose piece takes t
needs at least ceil(P / (floor(T / t) + 1)) replicas. With so few devices for each stage, two shortest paths over the
blocks say what T costs:

    devices(T, i) = min over k < i of devices(T, k) + replicas(T, k, i)
    rest(T, i)    = min over k < i of fill(k, i) + max(forward(0, k) + exposed(T, k, i), rest(T, k))

where devices(T, i) is more than there are, some round is longer than T. `rest` is fill and the reduction that is left,
which drains of earlier stages shorten: by less than those stages fill. The paths are found for a hundred T at once.
(Bottleneck search of chains-on-chains partitioning: Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
partitioning", 2004; here with replicas and a second cost.)
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from rannd.plan.search.estimate import NEVER, StageTables
from rannd.plan.topology import Table

COARSE, FINE = 24, 64
"""Numbers of T that are tried: over the whole range, and where the best plan must be."""


class Bounds:
    """Bounds for plans of two or more stages of one variant.

    Tables are ``[stages left, first blocks, ..]``; where the number of stages is free only index 0 is there.
    """

    def __init__(self, tables: StageTables, stages: int) -> None:
        self._tables = tables
        self._stages = stages
        """0: any number."""
        self._world = tables.world
        self._pieces = tables.world * tables.variant.microbatches
        count = self._count = tables.blocks
        self._next = tables.next_allowed()
        forward, fewest = tables.forward_us, tables.fewest()
        self._forward = forward[0]
        """Forward of the first blocks."""
        self._ways = [
            (fewest[0], *self._way(tables.backward_us, tables.weight_us)),
            (fewest[1], *self._way(tables.backward_us + forward, np.zeros_like(forward))),
        ]
        """Without recomputing and with: fewest replicas, round of a piece, fill."""
        # A stage on R of w devices runs P / R pieces; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._world + 1), 1)
        work = (forward + tables.backward_us + tables.add_us - self._filled(tables.weight_us))[0]
        mean = work[:, None] * np.maximum(self._pieces - devices, 0) / devices
        mean[1:, 0] = np.inf
        self.rounds = np.repeat(mean[None], stages + 1, axis=0)
        """``[.., devices]``: least longest round. Infinite where there is no device."""
        self._any = np.where(np.minimum(*fewest) < NEVER, 1, NEVER)[None]
        self._least_fill = np.where(fewest[0] < NEVER, self._ways[0][2], self._ways[1][2])
        self.rest = self._paths(self._any, np.zeros((1, count + 1, count + 1)), self._least_fill[None])[1][0]
        """Least fill and reduction together."""
        self.together = self.rest[:, :, None] + self.rounds
        """``[.., devices]``: least fill, reduction and longest round together, where nothing comes behind."""

    def _filled(self, waits: Table) -> Table:
        """Of each piece's round the part that at most is taken by what waits: one piece in `microbatches` saves it."""
        result: Table = np.minimum(waits, self._tables.forward_us) / self._tables.variant.microbatches
        return result

    def _way(self, backward: Table, waits: Table) -> tuple[Table, Table]:
        """Round of a piece and fill of every stage, whose backward takes so long, and of it `waits` under zb_h1."""
        tables = self._tables
        forward = tables.forward_us
        values, grads = np.minimum(*tables.values_us), np.minimum(*tables.grads_us)
        fill = forward + (backward - waits) + values + grads + tables.ranks_us
        fill[0] += tables.to_ranks + tables.agreeing_us
        backward = backward + tables.add_us
        if tables.steady:
            return np.maximum(np.maximum(forward + backward, values), grads) - self._filled(waits), fill
        return np.maximum(forward, values) + np.maximum(backward, grads), fill

    def of(self, left: int, end: int, devices: int) -> tuple[Table, Table, Table, Table]:
        """What is missing in front of a stage that ends at `end`, where it and what is missing have `devices`.

        ``[start, replicas - 1]`` of that stage: longest round; fill and reduction; all together; forward, which is no
        part of a drain.
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
        """Least E of all plans, as far as is known."""
        return float(self.together[self._stages, self._count, self._world])

    def sharpen(self, below: float, number: int) -> None:
        """Make the tables better, for plans that take less than `below`, with so many T."""
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
            # Devices fall as the limit grows: the first limit for which there are enough.
            first = (devices[:, left, :, None] > free).sum(axis=0)
            known = np.where(first > 0, limits[np.maximum(first - 1, 0)], 0.0)
            np.maximum(self.rounds[left], known, out=self.rounds[left])
            # A longest round between two limits costs the lower one, and leaves what the upper one does.
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
        """``[limit, stages left, end]``: fewest devices of the first blocks, and least fill and reduction.

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
