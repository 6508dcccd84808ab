"""Third phase: finds the stages of consecutive blocks, their replicas and variant with the smallest E.

Best-first search over partial plans (Hart, Nilsson, Raphael 1968), from the last stage to the first. A partial plan has
placed all blocks from some block on, on some of the devices; its state is that block, the devices used and the terms of
E so far:

    (sum of fill, longest rounds, reduction that is left after the drain of later stages)

A single number would not do: max F + max B has no optimal substructure. Of two partial plans with the same block and
devices, one whose terms are all at least as large is dropped. Bounds (bounds.py) give a lower limit of what is still to
come, so the first complete plan that no open partial plan can beat is the exact optimum of E. A search that is cut off
knows its maximum error: no plan is better than the smallest open bound.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import le
from typing import NamedTuple

import msgspec
import numpy as np

from rannd.plan.run_modes import Offload, Time, preference_us
from rannd.plan.search.bounds import COARSE, FINE, Bounds, exclude, sharpen
from rannd.plan.stage_costs.least_terms import LeastTerms, families
from rannd.plan.stage_costs.stage_terms import StageTerms
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Counts, Table

EFFORT = 200_000
"""Maximum effort of a search to prove that its plan is the best: partial plans expanded times devices (plus 8, for
costs that do not depend on devices); a few seconds."""

_FEW = 16
"""So many partial plans are expanded before closer bounds are found (`FINE`), which takes about as long. They often
tell that no plan is better than what is known."""

NEAR = 1.25
"""E may be so wrong, relative to another plan's."""


class Choice(msgspec.Struct, frozen=True):
    """A plan of the stage search."""

    variant: Variant
    starts: tuple[int, ...]
    """First block of each stage."""
    replicas: tuple[int, ...]
    step_us: float
    """E."""

    @property
    def preference_us(self) -> float:
        """E as it is compared with plans that have another ZeRO stage."""
        return preference_us(self.variant.zero, self.step_us)

    def spans(self, blocks: int) -> list[tuple[int, int, int, int]]:
        """Return (first block, end, replicas, devices of later stages) of each stage, for `blocks` blocks."""
        later = sum(self.replicas)
        found = []
        for start, end, count in zip(self.starts, [*self.starts[1:], blocks], self.replicas, strict=True):
            later -= count
            found.append((start, end, count, later))
        return found


class Found(msgspec.Struct, frozen=True):
    """Result of a search."""

    choice: Choice | None
    bound_us: float
    """Lower bound of what all plans are compared by (`preference_us`). Infinite if no plan fits."""
    searched_all: bool
    """False if the search was cut off."""
    passed: tuple[Choice, ...] = ()
    """Complete plans found during the search, best first."""

    def with_plans_of(self, others: Sequence[Found]) -> Found:
        """This, with what other searches of the same variants have passed, too: their choices first."""
        choices = [each.choice for each in (self, *others) if each.choice is not None]
        first = sorted(dict.fromkeys(choices), key=lambda each: each.preference_us)
        rest = (each for found in (self, *others) for each in found.passed)
        passed = (*first, *sorted(rest, key=lambda each: each.preference_us))
        return msgspec.structs.replace(self, passed=tuple(dict.fromkeys(passed)))


class Need(msgspec.Struct, frozen=True):
    """The smallest memory per device that some plan needs, and the stage that needs it."""

    bytes: float
    start: int
    end: int
    replicas: int
    used: int
    """Devices of the later stages."""
    of_block: tuple[float, ...]
    """Memory of each of its blocks as a stage of its own."""
    zero: int = 0
    """ZeRO stage of the plan; 0 if no stage has replicas."""
    offload: Offload = Offload()
    """What the plan has elsewhere."""


class _Partial(msgspec.Struct, frozen=True):
    start: int
    """First block that is placed."""
    used: int
    """Devices of the placed blocks."""
    stages: int
    """Stages left; 0 if their number is free."""
    terms: tuple[float, ...]
    """Fill, each of the rounds, reduction."""
    parent: _Partial | None = None


def best_choice(
    tables: Sequence[StageTerms],
    *,
    stages: int,
    effort: int = EFFORT,
    near: int = 0,
    known: Sequence[tuple[LeastTerms, int]] = (),
) -> Found:
    """Return the preferred one of all plans that fit: the one with the smallest E, as E is compared.

    Of equal plans the first one found is kept; the order is deterministic.

    Args:
        tables: One per variant.
        stages: Number of stages; 0: free.
        effort: Maximum effort of the proof.
        near: For so many variants, the most promising ones, `passed` also has a good plan that is not better than
            what was found before, if its E is less than `NEAR` times as large.
        known: `families` of the tables, if they were made before.
    """
    if not tables:
        return Found(None, math.inf, True)
    best: Choice | None = None
    passed: list[Choice] = []
    of_tables = known or families(tables)
    bounds: dict[LeastTerms, Bounds] = {}
    for least in dict.fromkeys(each for each, _ in of_tables):
        alone_too = stages in (0, 1) and least.replicas[-1] == least.world
        for table, us in zip(least.tables, least.alone() if alone_too else (), strict=False):
            if preference_us(table.variant.zero, us) < (math.inf if best is None else best.preference_us):
                alone = e_of(table, (0,), (table.world,))
                if alone is not None and (best is None or alone.preference_us < best.preference_us):
                    best = alone
                    passed.append(alone)
        if stages != 1 and least.blocks > 1 and least.replicas[0] < least.world:
            bounds[least] = Bounds(least, stages, close=not near)
    searches = [
        _Search(table, bounds[least], place, stages)
        for table, (least, place) in zip(tables, of_tables, strict=True)
        if least in bounds
    ]
    waiting = sorted(searches, key=lambda each: each.bound)
    wanted = near > 0
    """Whether plans near the best one are: bounds that are close, as those of `fit`, would leave hardly any."""
    while waiting:
        below = math.inf if best is None else best.preference_us * (NEAR if near > 0 else 1)
        exclude(_asked(waiting, below))
        waiting = [each for each in waiting if each.bound < below]
        if not waiting:
            break
        if best is None:  # then there is nothing to compare the others with
            if not wanted and sum(each.bounds.fit() for each in waiting):
                waiting.sort(key=lambda each: each.bound)
            _sharpen(waiting[:1], below, COARSE)
        else:
            for each in waiting if not wanted else ():
                each.bounds.fit()
            _sharpen(waiting, below, COARSE)
            waiting.sort(key=lambda each: each.bound)
        if waiting[0].bound >= below:
            continue
        found = waiting.pop(0).dive(below)
        near -= best is not None
        if found is not None:
            passed.append(found)
            best = min(best or found, found, key=lambda each: each.preference_us)
    return _Frontier(searches, best, passed, effort // (8 + max(table.world for table in tables))).run()


def e_of(table: StageTerms, starts: tuple[int, ...], replicas: tuple[int, ...]) -> Choice | None:
    """Return the given plan with its E; None if it is not possible."""
    if not table.has(replicas):
        return None
    choice = Choice(table.variant, starts, replicas, 0.0)
    fill = left_over = 0.0
    rounds = np.zeros(1 if table.counts.steady else 2)
    for start, end, count, used in reversed(choice.spans(table.blocks)):
        terms = table.stages(end, used)
        place = (start, table.column(count))
        if not np.isfinite(terms.fill[place]):
            return None
        fill += float(terms.fill[place])
        rounds = np.maximum(rounds, terms.rounds[(slice(None), *place)])
        left_over = max(float(terms.exposed[place]), left_over - float(terms.drain[place]))
    step_us = fill + float(rounds.sum()) + left_over
    return Choice(table.variant, starts, replicas, step_us)


class _Extended(NamedTuple):
    """A partial plan with one more stage: ``[start, number of replicas]`` of that one."""

    bound: Table
    """Lower bound of E."""
    fill: Table
    rounds: list[Table]
    left_over: Table


class _Search:
    """Partial plans of one variant, with two or more stages. Their bounds are compared as E is (`preference_us`)."""

    def __init__(self, table: StageTerms, bounds: Bounds, place: int, stages: int) -> None:
        self.table, self.bounds, self.place = table, bounds, place
        self.root = _Partial(table.blocks, 0, stages, (0.0,) * (2 if bounds.steady else 3) + (0.0,))

    @property
    def bound(self) -> float:
        """Lower bound for all plans."""
        return self.compared(self.bounds.root[self.place])

    def compared(self, us: Time) -> Time:
        """Return what plans of this variant that take so long are compared by."""
        return preference_us(self.table.variant.zero, us)

    def children(self, partial: _Partial, below: float) -> Iterator[tuple[float, _Partial]]:
        """Yield `partial` extended by one stage, with its bound, where that is below `below`."""
        extended = self._extended(partial)
        bound = self.compared(extended.bound)
        places = np.nonzero(bound < below)
        yield from zip(bound[places].tolist(), self._children(partial, places, extended), strict=True)

    def _children(self, partial: _Partial, places: tuple[Counts, ...], extended: _Extended) -> Iterator[_Partial]:
        """Yield `partial` extended by stages at these places of the tables: starts, numbers of replicas."""
        _, fill, rounds, left_over = extended
        starts, steps = places
        used = (partial.used + self.table.replicas[steps]).tolist()
        found = (fill[places].tolist(), *(each[places].tolist() for each in rounds), left_over[places].tolist())
        stages = max(partial.stages - 1, 0)
        for start, devices, *each in zip(starts.tolist(), used, *found, strict=True):
            yield _Partial(start, devices, stages, tuple(each), partial)

    def _extended(self, partial: _Partial) -> _Extended:
        """Return what a partial plan is with one more stage."""
        end, used = partial.start, partial.used
        stage = self.table.stages(end, used)
        left = self.table.world - used
        stages = max(partial.stages - 1, 0)
        rest_rounds, rest, together, forward = self.bounds.of(self.place, stages, end, left)
        fill = partial.terms[0] + stage.fill
        rounds = [np.maximum(each, before) for each, before in zip(stage.rounds, partial.terms[1:-1], strict=True)]
        left_over = np.maximum(stage.exposed, partial.terms[-1] - stage.drain)
        bound = np.maximum(rest, left_over + forward) + np.maximum(reduce(np.add, rounds), rest_rounds)
        bound = fill + np.maximum(bound, together)
        if partial is self.root:
            bound[0] = np.inf  # bounds do not hold for a single stage
        return _Extended(bound, fill, rounds, left_over)

    def dive(self, below: float) -> Choice | None:
        """Find a good plan greedily, by the stage with the smallest bound; None if it is not better than `below`."""
        partial = self.root
        while partial.start:
            extended = self._extended(partial)
            bound = extended.bound
            start, step = divmod(int(bound.argmin()), bound.shape[1])
            if not self.compared(float(bound[start, step])) < below:
                return None
            (partial,) = self._children(partial, (np.array([start]), np.array([step])), extended)
        return self.choice(partial)

    def choice(self, partial: _Partial) -> Choice:
        starts: list[int] = []
        replicas: list[int] = []
        at = partial
        while at.parent is not None:
            starts.append(at.start)
            replicas.append(at.used - at.parent.used)
            at = at.parent
        return Choice(self.table.variant, tuple(starts), tuple(replicas), sum(partial.terms))


def _sharpen(searches: Sequence[_Search], below: float, number: int) -> None:
    """Tighten the bounds of searches that may find better plans than `below`."""
    sharpen(_asked(searches, below), number)


def _asked(searches: Sequence[_Search], below: float) -> Iterable[tuple[Bounds, Table]]:
    """Return the time that plans of searches must not take to be better than `below`: by bounds and variant."""
    asked: dict[Bounds, Table] = {}
    for each in searches:
        if each.bound < below:
            times = asked.setdefault(each.bounds, np.zeros(len(each.bounds.root)))
            times[each.place] = below / each.compared(1.0)
    return asked.items()


class _Frontier:
    """Open partial plans of all variants, by ascending bound."""

    def __init__(self, searches: Sequence[_Search], best: Choice | None, passed: list[Choice], most: int) -> None:
        self.searches = searches
        self.best = best
        self.passed = passed
        self.most = most
        self.open: list[tuple[float, int, int, int, _Partial]] = []
        self.seen: dict[tuple[int, int, int, int], list[tuple[float, ...]]] = defaultdict(list)
        self.ticks = 0

    def run(self) -> Found:
        exclude(_asked(self.searches, self._below))
        best, passed = self.best, self.passed.copy()
        found = self._expand(min(_FEW, self.most))
        if found.searched_all and self.best is best:
            return found
        self.best, self.passed = best, passed
        _sharpen(self.searches, self._below, FINE)
        return self._expand(self.most)

    def _expand(self, most: int) -> Found:
        """Search from the start; not all if that takes more than `most` partial plans."""
        self.open.clear()
        self.seen.clear()
        for number, search in enumerate(self.searches):
            if search.bound < self._below:
                self._push(number, search.bound, search.root)
        expanded = 0
        while self.open and self.open[0][0] < self._below:
            if expanded >= most:
                return self._found(self.open[0][0], searched_all=False)
            bound, _, _, number, partial = heapq.heappop(self.open)
            if self._dominated(number, partial):
                continue
            expanded += 1
            search = self.searches[number]
            for child_bound, child in search.children(partial, self._below):
                if child.start:
                    self._push(number, max(bound, child_bound), child)
                elif search.compared(sum(child.terms)) < self._below:
                    self.best = search.choice(child)
                    self.passed.append(self.best)
        return self._found(self._below, searched_all=True)

    def _found(self, bound: float, *, searched_all: bool) -> Found:
        return Found(self.best, bound, searched_all, tuple(sorted(self.passed, key=lambda each: each.preference_us)))

    @property
    def _below(self) -> float:
        return self.best.preference_us if self.best is not None else math.inf

    def _push(self, number: int, bound: float, partial: _Partial) -> None:
        if bound < self._below:
            self.ticks += 1  # ties: deeper plans first, then older ones; the order is deterministic
            heapq.heappush(self.open, (bound, partial.start, self.ticks, number, partial))

    def _dominated(self, number: int, partial: _Partial) -> bool:
        place = self.seen[number, partial.start, partial.used, partial.stages]
        if any(all(map(le, other, partial.terms)) for other in place):
            return True
        place.append(partial.terms)
        return False


def smallest_memory(tables: Sequence[StageTerms], *, stages: int, below: float = np.inf) -> Need | None:
    """Return the smallest memory per device with which some plan fits, with or without recomputing.

    None if no plan exists at any memory, because the requested numbers contradict each other, or none below `below`.
    """
    best: Need | None = None
    seen = set()
    for bound, table in sorted(((table.memory_at_least(), table) for table in tables), key=lambda each: each[0]):
        if bound >= below:
            break
        variant = msgspec.structs.replace(table.variant, placement="")
        what = variant, table.offload, table.allowed.tobytes(), table.replicas.tobytes()
        if what in seen:
            continue  # where the slots are makes no difference to memory
        seen.add(what)
        need = _smallest(table, stages, below)
        if need is not None:
            best, below = need, need.bytes
    return best


def _smallest(table: StageTerms, stages: int, below: float) -> Need | None:
    """Minimise the memory of the largest stage by dynamic programming, placing blocks from the last one on.

    None if it is not below `below`.
    """
    count, world = table.blocks, table.world
    # [stages placed, first block placed, devices used]; if the number of stages is free, only index 0 is used
    least = np.full((stages + 1, count + 1, world + 1), np.inf)
    least[0, count, 0] = 0.0
    came: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    sizes: dict[tuple[int, int, int], float] = {}
    for placed in range(max(stages, 1)):
        after = placed + 1 if stages else 0
        for end in range(count, 0, -1):
            for used in np.flatnonzero(np.isfinite(least[placed, end, :world])).tolist():
                memory = table.least_memory(end, used)
                largest = np.maximum(memory, least[placed, end, used])
                devices = used + table.replicas[: memory.shape[1]]
                there = least[after, :end][:, devices]
                better = (largest < there) & (largest < below)
                for start, step in zip(*np.nonzero(better), strict=True):
                    place = (after, int(start), int(devices[step]))
                    came[place] = (placed, end, used)
                    sizes[place] = float(memory[start, step])
                least[after, :end][:, devices] = np.where(better, largest, there)
    place = (stages, 0, world)
    size = float(least[place])
    if not np.isfinite(size):
        return None
    shared = False
    at = place
    while at in came:
        shared |= at[2] - came[at][2] > 1
        at = came[at]
    while sizes[place] < size:
        place = came[place]
    before = came[place]
    start, end, used, replicas = place[1], before[1], before[2], place[2] - before[2]
    alone = tuple(float(table.bytes_needed(at, at + 1, replicas, used=used)) for at in range(start, end))
    return Need(
        size,
        start,
        end,
        replicas,
        used,
        alone,
        table.variant.zero if shared or table.offload.params else 0,
        table.offload,
    )
