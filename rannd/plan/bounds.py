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

from rannd.plan.estimate import NEVER, StageTables
from rannd.plan.machine import Table

COARSE, FINE = 32, 96
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
        again, self._fewest, self._next = tables.fewest()
        forward = tables.forward_us
        self._forward = forward[0]
        """Forward of the first blocks."""
        self._backward = tables.backward_us + np.where(again, forward, 0.0)
        values, grads = np.minimum(*tables.values_us), np.minimum(*tables.grads_us)
        if tables.steady:
            self._round = np.maximum(np.maximum(forward + self._backward, values), grads)
        else:
            self._round = np.maximum(forward, values) + np.maximum(self._backward, grads)
        self._fill = forward + self._backward + values + grads + tables.ranks_us
        self._fill[0] += tables.to_ranks
        # A stage on R of w devices runs P / R pieces; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._world + 1), 1)
        work = (forward + tables.backward_us)[0]
        mean = work[:, None] * np.maximum(self._pieces - devices, 0) / devices
        mean[1:, 0] = np.inf
        self.rounds = np.repeat(mean[None], stages + 1, axis=0)
        """``[.., devices]``: least longest round. Infinite where there is no device."""
        fewest = np.where(self._fewest < NEVER, 1, NEVER)[None]
        self.rest = self._paths(fewest, np.zeros((1, count + 1, count + 1)))[1][0]
        """Least fill and reduction together."""
        self.together = self.rest[:, :, None] + self.rounds
        """``[.., devices]``: least fill, reduction and longest round together, where nothing comes behind."""

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

    def sharpen(self, below: float) -> None:
        """Make the tables as good as they can be for plans that take less than `below`."""
        for number in (COARSE, FINE):
            place = (self._stages, self._count)
            least = max(float(self.rounds[(*place, self._world)]), 1e-6)
            most = below - float(self.rest[place])
            if not np.isfinite(most):
                finite = self._round[np.isfinite(self._round)]
                most = float(finite.max()) * self._pieces
            if not least < most:
                return
            self._try(np.geomspace(least, most, number))

    def _try(self, limits: Table) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            pieces = np.floor(limits[:, None, None] / self._round * (1 + 1e-12) + 1e-12) + 1
            pieces = np.where(self._round > 0, np.minimum(pieces, self._pieces), self._pieces)
        replicas = np.ceil(self._pieces / pieces).astype(np.int64)
        replicas = np.maximum(self._next[np.minimum(replicas, self._world + 1)], self._fewest)
        starts, ends = np.ogrid[: self._count + 1, : self._count + 1]
        exposed = self._exposed[starts, ends, np.minimum(replicas, self._world) - 1]
        devices, rest = self._paths(replicas, exposed)
        any_rest = self._paths(np.where(self._fewest < NEVER, 1, NEVER)[None], self._exposed[None, :, :, 0])[1][0]
        np.maximum(self.rest, any_rest, out=self.rest)
        number, free = len(limits), np.arange(1, self._world + 1)
        for left in range(self._stages + 1):
            for end in range(1, self._count + 1):
                # Devices fall as the limit grows: the first limit for which there are enough.
                first = np.searchsorted(-devices[:, left, end], -free, side="left")
                known = np.where(first > 0, limits[np.maximum(first - 1, 0)], 0.0)
                rounds, together = self.rounds[left, end, 1:], self.together[left, end, 1:]
                np.maximum(rounds, known, out=rounds)
                # A longest round between two limits costs the lower one, and leaves what the upper one does.
                upper = np.append(rest[:, left, end], self.rest[left, end])
                least = np.minimum.accumulate((np.append(0.0, limits) + upper)[::-1])[::-1]
                np.maximum(
                    together, np.maximum(self.rest[left, end] + rounds, least[np.minimum(first, number)]), out=together
                )

    @cached_property
    def _exposed(self) -> Table:
        """``[start, end, replicas - 1]``: least reduction that is left with so many replicas or more."""
        count = self._count
        found = np.zeros((count + 1, count + 1, self._world))
        for end in range(1, count + 1):
            found[:end, end] = self._tables.exposed_at_least(end)
        found = np.minimum.accumulate(found[:, :, ::-1], axis=2)[:, :, ::-1]
        return found

    def _paths(self, replicas: npt.NDArray[np.int64], exposed: Table) -> tuple[npt.NDArray[np.int64], Table]:
        """``[limit, stages left, end]``: fewest devices of the first blocks, and least fill and reduction.

        `replicas` and `exposed`: ``[limit, start, end]``, of a stage.
        """
        number, count, stages = len(replicas), self._count, self._stages
        devices = np.full((number, stages + 1, count + 1), NEVER, dtype=np.int64)
        rest = np.full((number, stages + 1, count + 1), np.inf)
        devices[:, 0, 0] = 0
        rest[:, 0, 0] = 0.0
        fill = np.where(replicas < NEVER, self._fill, np.inf)
        left_over = self._forward[:, None] + exposed
        for left in range(min(stages, 1), stages + 1):
            before = max(left - 1, 0)
            for end in range(1, count + 1):
                fewest = (devices[:, before, :end] + replicas[:, :end, end]).min(axis=1)
                devices[:, left, end] = np.minimum(fewest, NEVER)
                after = np.maximum(left_over[:, :end, end], rest[:, before, :end])
                rest[:, left, end] = (fill[:, :end, end] + after).min(axis=1)
        return devices, rest
