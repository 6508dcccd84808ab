"""Lower bounds: what the stages that are still missing must add to E, whatever they are.

A stage with R replicas runs ceil(P / R) of P microbatches. If no round may take longer than T, a stage that takes t per
microbatch needs at least ceil(P / (floor(T / t) + 1)) replicas. With these minimum devices per stage, two shortest
paths over the blocks give the cost of T:

    devices(T, i) = min over k < i of devices(T, k) + replicas(T, k, i)
    rest(T, i)    = min over k < i of fill(k, i) + max(forward(0, k) + exposed(T, k, i), rest(T, k))

If devices(T, i) exceeds the devices there are, some round is longer than T. `rest` is fill plus exposed reduction,
which drains of earlier stages shorten: by less than the fill of those stages. The paths are computed for some T of all
variants at once; before that, `devices` alone for a single T, which tells of most variants that they have no better
plan than one that is known, or none that fits (`exclude`). (Bottleneck search of chains-on-chains partitioning: Pinar
and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004; here with replicas and a second cost.)

If all stages have the same number of replicas, as many stages follow a stage as devices do, so it is known which blocks
fit there, and whether they recompute. Two shortest paths with these, from the first stage on, are close to the best E.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rannd.plan.stage_costs.least_terms import LeastTerms
from rannd.plan.stage_costs.stage_terms import NEVER
from rannd.plan.topology import Counts, Table

COARSE, FINE = 8, 32
"""Number of T to try: over the whole range, and close to the best plan."""


class Bounds:
    """Lower bounds for plans of two or more stages, of several variants.

    Tables are ``[variant, stages left, first blocks, ..]``; if the number of stages is free, only index 0 of it exists.
    `close`: whether more is asked of what fits memory, with which a search has fewer plans to look at.
    """

    def __init__(self, tables: LeastTerms, stages: int, *, close: bool = True) -> None:
        self._tables, self._times, self._close = tables, tables.times, close
        self._tried = np.zeros(len(tables.times.microbatches), dtype=np.int64)
        """By variant, the maximum number of values of T that were tried at a time."""
        self._excluded = np.zeros(len(tables.times.microbatches))
        """By variant, the time that was asked for in `replicas_within`."""
        self.steady = tables.counts.steady
        """Whether forward and backward take turns."""
        self._fitted = False
        """Whether `fit` tightened the tables."""
        self.stages = stages
        """Number of stages; 0: any."""
        self._numbers = np.append(tables.replicas, NEVER)
        self._place_of = np.searchsorted(tables.replicas, np.arange(tables.world + 2))
        """For a number of devices, the place of the number of replicas that is as large."""
        self._unit = math.gcd(tables.world, *tables.replicas.tolist())
        """Devices are counted in multiples of this."""
        self._units = tables.world // self._unit
        self._count = tables.blocks
        # A stage on R of w devices runs P / R microbatches; if all are equally busy the longest round is the mean.
        devices = np.maximum(np.arange(self._units + 1) * self._unit, 1)
        mean = self._times.work[:, :, None] * np.maximum(self._times.pieces[:, None, None] - devices, 0) / devices
        mean[:, 1:, 0] = np.inf
        self.rounds = np.repeat(mean[:, None], stages + 1, axis=1)
        """``[.., units of devices]``: lower bound of the longest round. Infinite without devices."""
        self.rest = np.repeat(self._times.fill[:, None], stages + 1, axis=1)  # several stages send no less than one
        self.rest[:, 0, 0] = 0.0
        if stages:
            self.rest[:, 0, 1:] = self.rest[:, 1:, 0] = np.inf
        """Lower bound of fill plus exposed reduction."""
        self.together = self.rest[..., None] + self.rounds
        """``[.., units of devices]``: lower bound of fill, reduction and longest round, if no stage follows."""
        self._changed()

    @cached_property
    def _fewest(self) -> tuple[Counts, Counts]:
        """Without and with recomputing: place of the minimum replicas, ``[variant, stage]``."""
        return self._tables.fewest(self._close)

    def of(self, variant: int, left: int, end: int, devices: int) -> tuple[Table, Table, Table, Table]:
        """Return bounds for what is missing before a stage that ends at `end`; it and the missing ones have `devices`.

        `variant`: its place. Tables ``[start, number of replicas]`` of that stage: longest round; fill and reduction;
        all together; forward, which is not part of a drain.
        """
        key = variant, left, end, devices
        if key not in self._known:
            replicas = self._tables.replicas
            after = (devices - replicas[: np.searchsorted(replicas, devices, side="right")]) // self._unit
            self._known[key] = (
                self.rounds[variant, left, :end][:, after],
                self.rest[variant, left, :end, None],
                self.together[variant, left, :end][:, after],
                self._times.forward[variant, :end, None],
            )
        return self._known[key]

    def _changed(self) -> None:
        """Forget what was derived from the tables."""
        self.root: list[float] = self.together[:, self.stages, self._count, self._units].tolist()
        """By variant, lower bound of E for all plans."""
        self._known: dict[tuple[int, int, int, int], tuple[Table, Table, Table, Table]] = {}
        """What `of` returned."""

    def stages_within(self, below: Table, number: int) -> StagesWithin | None:
        """Return what `sharpen` tries for plans that take less than `below`, with `number` values of T.

        `below`: by variant; 0 where nothing is asked. None if that was done, or helps nothing.
        """
        place = (slice(None), self.stages, self._count)
        least = np.maximum(self.rounds[(*place, self._units)], 1e-6)
        longest = self._times.rounds[1].max(axis=1) * self._times.pieces
        most = np.where(np.isfinite(below), below - self.rest[place], longest)
        (variants,) = np.nonzero((self._tried < number) & (least < most))
        if not len(variants):
            return None
        self._tried[variants] = number
        least, most = least[variants], most[variants]
        # With the last one any replicas may do.
        limits = np.full((len(variants), number + 1), np.inf)
        limits[:, :-1] = np.geomspace(least, most, number, axis=1)
        plain, again = (each[variants].T[:, :, None] for each in self._times.fills)
        keeping, places = self._places(variants, limits)
        replicas = self._numbers[places]
        fill = np.where(keeping < len(self._tables.replicas), plain, again)
        fill = np.where(replicas < NEVER, fill, np.inf)
        exposed = np.moveaxis(self._tables.exposed(variants), 0, 1)
        if exposed.shape[2] > 1:
            exposed = np.take_along_axis(exposed, np.minimum(places, exposed.shape[2] - 1), axis=2)
        left_over = self._times.forward[variants][:, self._tables.runs.starts].T[:, :, None] + exposed
        left_over = np.broadcast_to(left_over, fill.shape)
        flat = len(fill), -1
        return StagesWithin(
            self, variants, limits[:, :-1], replicas.reshape(flat), fill.reshape(flat), left_over.reshape(flat)
        )

    def replicas_within(self, below: Table) -> tuple[Counts, Counts] | None:
        """Return the minimum replicas of stages in plans that take less than `below`: ``[stage, variant]``.

        `below`: by variant, as for `stages_within`. The places of the variants come first. None if that was asked for
        before.
        """
        (variants,) = np.nonzero((below > 0) & (below != self._excluded))
        if not len(variants):
            return None
        self._excluded[variants] = below[variants]
        limits = np.maximum(below[variants] - self.rest[variants, self.stages, self._count], 0.0)[:, None]
        if np.isinf(limits).all():  # any that fit
            return variants, self._numbers[np.minimum(*self._fewest)[variants].T]
        return variants, self._numbers[self._places(variants, limits)[1][:, :, 0]]

    def exclude(self, variants: Counts, below: Table, devices: Counts) -> None:
        """Raise bounds to `below` where plans that take less need more `devices` than there are; by variant."""
        variants = variants[devices > self._tables.world]
        if len(variants):
            there = variants, self.stages, self._count, self._units
            self.together[there] = np.maximum(self.together[there], below[variants])
            self._changed()

    def fit(self) -> bool:
        """Tighten the tables with what fits memory, if all stages have the same number of replicas.

        How many stages follow a stage is known then, and with it what the stage needs. False if that was done, or helps
        nothing.
        """
        tables = self._tables
        alike = len(tables.replicas) == 1 and self.steady and not tables.counts.splits
        if self._fitted or not alike or self._units > self._count:
            return False
        self._fitted = True
        starts, ends, _ = self._tables.runs
        plain, again = tables.fitting(self._units)
        by_end = np.lexsort((starts, ends))
        first = np.searchsorted(ends[by_end], np.arange(1, self._count + 1))
        fill, rounds = (
            np.where(plain, without[:, None], np.where(again, recomputing[:, None], np.inf))[:, :, by_end]
            for without, recomputing in (self._times.fills, self._times.rounds)
        )
        rounds *= (tables.counts.pieces - 1).astype(float)
        exposed = tables.exposed(np.arange(len(self.root)))[:, :, 0]
        left_over = (self._times.forward[:, starts] + exposed)[:, by_end]
        starts = starts[by_end]
        rest, longest = (np.full((len(fill), self._count + 1), np.inf) for _ in range(2))
        rest[:, 0] = longest[:, 0] = 0.0
        for number in range(1, self._units + 1):
            own = np.maximum(left_over, rest[:, starts]) + fill[:, number - 1]
            rest[:, 1:] = np.minimum.reduceat(own, first, axis=1)
            own = np.maximum(rounds[:, number - 1], longest[:, starts])
            longest[:, 1:] = np.minimum.reduceat(own, first, axis=1)
            rest[:, 0] = longest[:, 0] = np.inf
            for known, better in ((self.rounds, longest), (self.together, rest + longest)):
                there = known[:, min(number, self.stages), :, number]
                np.maximum(there, better, out=there)
        self._changed()
        return True

    def tighten(self, variants: Counts, limits: Table, devices: Counts, rest: Table) -> None:
        """Tighten the tables of some variants with the paths of `limits`, and of any replicas last.

        `variants`: their places; `limits`: ``[variant, limit]``; others: ``[stages left, end, variant, limit]``.
        """
        free = np.arange(self._units + 1) * self._unit
        lower = np.concatenate([np.zeros((len(limits), 1)), limits], axis=1)
        known = np.concatenate([lower, np.full((len(limits), 1), np.inf)], axis=1)[None]
        for left in range(self.stages + 1):
            there = variants, left
            self.rest[there] = np.maximum(self.rest[there], rest[left, :, :, -1].T)
            # The devices needed fall as the limit grows: find the first limit for which there are enough.
            first = (devices[left, ..., None] > free).sum(axis=2)
            rounds = np.maximum(self.rounds[there], _by_variant(np.take_along_axis(known, first, axis=2)))
            self.rounds[there] = rounds
            # A longest round between two limits costs at least the lower limit, with the rest of the upper one.
            upper = np.concatenate([rest[left, :, :, :-1], self.rest[there].T[:, :, None]], axis=2)
            least = np.minimum.accumulate((lower + upper)[..., ::-1], axis=2)[..., ::-1]
            first = np.minimum(first, limits.shape[1])
            together = np.maximum(
                self.rest[there][..., None] + rounds, _by_variant(np.take_along_axis(least, first, axis=2))
            )
            together[:, 0] = self.together[variants, left, 0]
            self.together[there] = np.maximum(self.together[there], together)
        self._changed()

    def _places(self, variants: Counts, limits: Table) -> tuple[Counts, Counts]:
        """Return the place of the minimum replicas of stages whose rounds are within limits: without recomputing, and
        with or without. ``[stage, variant, limit]``; `limits`: ``[variant, limit]``.
        """
        found = [
            np.maximum(self._place_of[np.minimum(needed, self._tables.world + 1)], fewest[variants].T[:, :, None])
            for fewest, needed in zip(self._fewest, self._times.needed(variants, limits), strict=True)
        ]
        return found[0], np.minimum(*found)


class StagesWithin(NamedTuple):
    """Stages whose rounds are within limits: ``[stage, variants' limits]``; any limit last of each variant."""

    bounds: Bounds
    variants: Counts
    """Places of the variants."""
    limits: Table
    """``[variant, limit]``, but the last one."""
    replicas: Counts
    """Minimum number; NEVER if there is no such stage."""
    fill: Table
    left_over: Table
    """Forward of the blocks before the stage, and its exposed reduction."""


def _by_variant(table: Table) -> Table:
    return np.moveaxis(table, 1, 0)


def sharpen(each: Iterable[tuple[Bounds, Table]], number: int) -> None:
    """Tighten bounds of one search for plans that take less than a time each, with `number` values of T.

    Times are by variant; 0 where nothing is asked.
    """
    tried = [found for bounds, below in each if (found := bounds.stages_within(below, number)) is not None]
    if tried:
        replicas, fill, left_over = (
            np.concatenate([getattr(found, name) for found in tried], axis=1)
            for name in ("replicas", "fill", "left_over")
        )
        stages = tried[0].bounds.stages
        paths = _devices(replicas, stages), _rest(fill, left_over, stages)
        ends = np.cumsum([found.replicas.shape[1] for found in tried])[:-1]
        for found, *parts in zip(tried, *(np.split(path, ends, axis=2) for path in paths), strict=True):
            shape = len(found.variants), number + 1
            devices, rest = (part.reshape(*part.shape[:2], *shape) for part in parts)
            found.bounds.tighten(found.variants, found.limits, devices, rest)


def exclude(each: Iterable[tuple[Bounds, Table]]) -> None:
    """Raise bounds of one search to a time each where so many devices as any quicker plan needs are not there.

    Times are as for `sharpen`; infinite: whether any plan fits.
    """
    asked = [(*found, bounds, below) for bounds, below in each if (found := bounds.replicas_within(below)) is not None]
    if asked:
        replicas, stages = np.concatenate([replicas for _, replicas, *_ in asked], axis=1), asked[0][2].stages
        ends = np.cumsum([len(variants) for variants, *_ in asked])[:-1]
        devices = np.split(_devices(replicas, stages)[-1, -1], ends)
        for (variants, _, bounds, below), needed in zip(asked, devices, strict=True):
            bounds.exclude(variants, below, needed)


def _devices(replicas: Counts, stages: int) -> Counts:
    """Return ``[stages left, end, limit]``: minimum devices for the first blocks."""
    number = replicas.shape[1]
    count = math.isqrt(2 * len(replicas))
    devices = np.full((stages + 1, count + 1, number), NEVER, dtype=np.int64)
    devices[0, 0] = 0
    for left in range(min(stages, 1), stages + 1):
        before, first = max(left - 1, 0), 0
        for start in range(count):
            own = slice(first, first + count - start)  # the stages with this first block
            first = own.stop
            more = devices[before, start] + replicas[own]
            np.minimum(devices[left, start + 1 :], more, out=devices[left, start + 1 :])
    return devices


def _rest(fill: Table, left_over: Table, stages: int) -> Table:
    """Return ``[stages left, end, limit]``: minimum fill plus reduction of the first blocks."""
    number = fill.shape[1]
    count = math.isqrt(2 * len(fill))
    rest = np.full((stages + 1, count + 1, number), np.inf)
    rest[0, 0] = 0.0
    for left in range(min(stages, 1), stages + 1):
        before, first = max(left - 1, 0), 0
        for start in range(count):
            own = slice(first, first + count - start)  # as above
            first = own.stop
            after = np.maximum(left_over[own], rest[before, start])
            after += fill[own]
            np.minimum(rest[left, start + 1 :], after, out=rest[left, start + 1 :])
    return rest
