"""Third phase: stages of consecutive blocks, their replicas and the microbatches, with the least E.

Best-first search over partial plans (Hart, Nilsson, Raphael 1968). A partial plan has placed the first i blocks
on some of the devices; it is described by its block, the devices left and the four terms of E so far:

    (sum of fill, largest forward, largest backward, largest allreduce)

No single number would do: max F + max B has no optimal substructure. Of two partial plans in the same place, one
whose four terms are all at least as large is dropped. What is still to come is bounded from below by the best
that any completion could reach in each term alone (five tables, filled from the last block on), so the first
whole plan that no open partial plan can beat is the optimum of E, exactly.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from rannd.plan.estimate import StageTables
from rannd.plan.intervals import Table

_FILL, _FORWARD, _BACKWARD, _ALLREDUCE, _BOTH = range(5)


class Choice(msgspec.Struct, frozen=True):
    """A plan as the stage phase makes it."""

    starts: tuple[int, ...]
    """First block of each stage."""
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    microbatches: int
    step_us: float
    """E."""


class Need(msgspec.Struct, frozen=True):
    """The smallest memory per device with which some plan would do, and the stage that needs it."""

    bytes: float
    start: int
    end: int
    replicas: int
    microbatches: int


class _Partial(msgspec.Struct, frozen=True):
    block: int
    devices: int
    """Devices left."""
    stages: int
    """Stages left; 0 where their number is free."""
    terms: tuple[float, float, float, float]
    parent: _Partial | None = None


def best_choice(
    tables: Sequence[StageTables], *, limit: float, allowed: npt.NDArray[np.bool_], stages: int, recompute: str
) -> Choice | None:
    """The plan with the least E of all that fit, or None where none does.

    `tables`: one for each number of microbatches; `limit`: bytes of memory per device; `allowed`: by number of
    replicas, or by first block, end and number of replicas; `stages`: their number, 0 where it is free; `recompute`:
    "never", "needed" (in stages that do not fit without) or "always". Among equal plans the one found first stays,
    which is the same everywhere.
    """
    best = _one_stage(tables, limit, allowed, recompute) if stages in (0, 1) else None
    searches = []
    for table in tables if stages != 1 else ():
        # Even with no transfers, and all devices busy to the end, two or more stages take at least this.
        world, pieces = table.world, table.world * table.microbatches
        work = float(table.forward_us[0, -1] + table.backward_us[0, -1])
        if best is None or work * (1 + (pieces - world + 1) / world) < best.step_us:
            searches.append(_Search(table, limit, allowed, stages, recompute))
            best = searches[-1].dive(best)
    return _Frontier(searches, best).run()


def _one_stage(
    tables: Sequence[StageTables], limit: float, allowed: npt.NDArray[np.bool_], recompute: str
) -> Choice | None:
    """The best plan of one stage on all devices."""
    best: Choice | None = None
    for table in tables:
        last, world = table.intervals.count, table.world
        terms, again = _terms(table, limit, allowed, recompute)
        step_us = float(terms[:_BOTH, 0, last, world].sum())
        if step_us < (best.step_us if best is not None else np.inf):
            best = Choice((0,), (world,), (bool(again[0, last, world]),), table.microbatches, step_us)
    return best


def _terms(
    table: StageTables, limit: float, allowed: npt.NDArray[np.bool_], recompute: str
) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Terms of E ``[term, i, j, R]``, infinite where a stage does not fit, and where it recomputes."""
    again = np.full(table.memory.shape, recompute == "always") | ((table.memory > limit) & (recompute == "needed"))
    fill = table.fill + again * table.recompute_fill_us
    backward = table.backward + again * table.recompute_backward_us
    terms = np.stack([fill, table.forward, backward, table.allreduce, table.forward + backward])
    memory = np.where(again, table.memory_recompute, table.memory)
    terms[:, ~(allowed & (memory <= limit))] = np.inf
    return terms, again


class _Search:
    """Partial plans of one number of microbatches."""

    def __init__(
        self, table: StageTables, limit: float, allowed: npt.NDArray[np.bool_], stages: int, recompute: str
    ) -> None:
        self.table = table
        self.terms, self.recompute = _terms(table, limit, allowed, recompute)
        self.rest = completions(self.terms, added=1, stages=stages)
        self.root = _Partial(0, table.world, stages, (0.0, 0.0, 0.0, 0.0))
        least = self.rest[stages, :, 0, table.world]
        self.bound = float(least[_FILL] + max(least[_FORWARD] + least[_BACKWARD], least[_BOTH]) + least[_ALLREDUCE])

    def children(self, partial: _Partial, below: float) -> Iterator[tuple[float, _Partial]]:
        """What one more stage makes of `partial`, with the bound of E, where that is less than `below`."""
        block, devices = partial.block, partial.devices
        left = max(partial.stages - 1, 0)
        stage = self.terms[:, block, block + 1 :, 1 : devices + 1]
        rest = self.rest[left, :, block + 1 :, :devices][:, :, ::-1]
        fill = partial.terms[_FILL] + stage[_FILL]
        largest = np.maximum(stage[1:4], np.array(partial.terms[1:])[:, None, None])
        final = np.maximum(largest, rest[1:4])
        bound = fill + rest[_FILL] + np.maximum(final[0] + final[1], rest[_BOTH]) + final[2]
        for at, step in zip(*np.nonzero(bound < below), strict=True):
            terms = (float(fill[at, step]), *(float(term) for term in largest[:, at, step]))
            child = _Partial(block + 1 + int(at), devices - 1 - int(step), left, terms, partial)  # type: ignore[arg-type]
            yield float(bound[at, step]), child

    def done(self, partial: _Partial) -> bool:
        return partial.block == self.table.intervals.count and partial.devices == 0

    def dive(self, best: Choice | None) -> Choice | None:
        """A good plan at once: the most promising stage, again and again. `best` where it is no better."""
        partial = self.root
        below = best.step_us if best is not None else np.inf
        while not self.done(partial):
            found = min(self.children(partial, below), key=lambda child: child[0], default=None)
            if found is None:
                return best
            partial = found[1]
        return self.choice(partial)

    def choice(self, partial: _Partial) -> Choice:
        step_us = partial.terms[_FILL] + partial.terms[_FORWARD] + partial.terms[_BACKWARD] + partial.terms[_ALLREDUCE]
        path: list[_Partial] = []
        at: _Partial | None = partial
        while at is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        starts = tuple(each.block for each in path[:-1])
        ends = [each.block for each in path[1:]]
        counts = [before.devices - after.devices for before, after in pairwise(path)]
        again = [bool(self.recompute[key]) for key in zip(starts, ends, counts, strict=True)]
        return Choice(starts, tuple(counts), tuple(again), self.table.microbatches, step_us)


class _Frontier:
    """Open partial plans of all numbers of microbatches, the most promising first."""

    def __init__(self, searches: Sequence[_Search], best: Choice | None) -> None:
        self.searches = searches
        self.best = best
        self.open: list[tuple[float, int, int, int, _Partial]] = []
        self.seen: dict[tuple[int, int, int, int], list[tuple[float, ...]]] = defaultdict(list)
        self.ticks = 0

    def run(self) -> Choice | None:
        for number, search in enumerate(self.searches):
            self._push(number, search.bound, search.root)
        while self.open:
            bound, _, _, number, partial = heapq.heappop(self.open)
            if bound >= self._below:
                break
            if self._dominated(number, partial):
                continue
            search = self.searches[number]
            for child_bound, child in search.children(partial, self._below):
                if search.done(child):
                    choice = search.choice(child)
                    if choice.step_us < self._below:
                        self.best = choice
                else:
                    self._push(number, child_bound, child)
        return self.best

    @property
    def _below(self) -> float:
        return self.best.step_us if self.best is not None else np.inf

    def _push(self, number: int, bound: float, partial: _Partial) -> None:
        if bound < self._below:
            self.ticks += 1  # among equals deeper plans, then older ones: the order is the same everywhere
            heapq.heappush(self.open, (bound, -partial.block, self.ticks, number, partial))

    def _dominated(self, number: int, partial: _Partial) -> bool:
        place = self.seen[number, partial.block, partial.devices, partial.stages]
        if any(all(a <= b for a, b in zip(other, partial.terms, strict=True)) for other in place):
            return True
        place.append(partial.terms)
        return False


def completions(terms: Table, *, added: int, stages: int) -> Table:
    """Least value of each term alone with which the blocks from i on can use exactly w devices.

    `terms`: ``[term, i, j, R]``; the first `added` are added up over stages, of the others the largest counts.
    Returns ``[stages left, term, i, w]``; where the number of stages is free (`stages` 0) only index 0 is there
    and means 'any number'. Infinite where no completion exists.
    """
    count, world = terms.shape[1] - 1, terms.shape[3] - 1
    # One column more, infinite: what a stage leaves that takes more devices than there are.
    rest = np.full((stages + 1, len(terms), count + 1, world + 2), np.inf)
    rest[0, :, count, 0] = 0.0
    devices_left = np.arange(world + 1)[None, :] - np.arange(1, world + 1)[:, None]
    devices_left[devices_left < 0] = world + 1
    for left in range(min(stages, 1), stages + 1):
        after = rest[max(left - 1, 0)]
        for start in range(count - 1, -1, -1):
            stage = terms[:, start, start + 1 :, 1:, None]
            then = after[:, start + 1 :, devices_left]
            rest[left, :added, start, :-1] = (stage[:added] + then[:added]).min(axis=(1, 2))
            rest[left, added:, start, :-1] = np.maximum(stage[added:], then[added:]).min(axis=(1, 2))
    return rest[:, :, :, :-1]


def smallest_memory(tables: Sequence[StageTables], *, allowed: npt.NDArray[np.bool_], stages: int) -> Need | None:
    """The least memory per device with which some plan would do, with or without recomputing.

    None where no plan exists at any memory: the numbers that were asked for clash.
    """
    best: Need | None = None
    for table in tables:
        memory = np.minimum(table.memory, table.memory_recompute)
        memory[~np.broadcast_to(allowed, memory.shape)] = np.inf
        rest = completions(memory[None], added=0, stages=stages)
        least = float(rest[stages, 0, 0, table.world])
        if np.isfinite(least) and (best is None or least < best.bytes):
            best = _largest_stage(table, memory, rest, least, stages)
    return best


def _largest_stage(table: StageTables, memory: Table, rest: Table, least: float, stages: int) -> Need:
    """The stage of exactly `least` bytes in a plan that needs no more."""
    start, devices, left = 0, table.world, stages
    while True:
        after = max(left - 1, 0)
        size = np.maximum(memory[start, start + 1 :, 1 : devices + 1], rest[after, 0, start + 1 :, :devices][:, ::-1])
        at, step = np.unravel_index(int(np.argmin(size)), size.shape)
        end, replicas = start + 1 + int(at), 1 + int(step)
        if memory[start, end, replicas] >= least:
            return Need(least, start, end, replicas, table.microbatches)
        start, devices, left = end, devices - replicas, after
