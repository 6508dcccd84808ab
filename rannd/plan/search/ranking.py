"""Re-ranks the best plans with the simulator: E does not model microbatches that queue behind each other."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import Alternative, Deployment
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import LEAST_GAIN, preference_us
from rannd.plan.schedule.schedules import DELAYING
from rannd.plan.search.candidates import Candidate, EvenSplit, relieved
from rannd.plan.simulate.layout import layout_and_costs, loss_layout
from rannd.plan.simulate.least_time import least_us
from rannd.plan.simulate.simulator import predict
from rannd.plan.slot_memory import busiest_us
from rannd.plan.stage_costs.variant import Variant
from rannd.profile.costs import CostTable

MOST_PLAYED = 32
"""Maximum number of simulated plans, those with the smallest E."""
FEWEST_PLAYED = 4
MOST_WORK = 50_000
"""Maximum of microbatches times stages that are simulated in total, beyond the first few plans: a second or two."""
MOST_MOVING = 5_000
"""Maximum of microbatches times stages that are simulated of plans with moved cuts."""
MOVED_GAIN = 0.01
"""Part of a step that a moved cut has to save: with equal stages a plan is better if costs are others."""
MOST_ALIKE = 4
"""Maximum number of these, the fastest, that are simulated under other schedules, too,"""
MOST_WORK_ALIKE = 10_000
"""and maximum of microbatches times stages that are simulated of them, beyond the first."""
MOST_TOLD = 8
"""Maximum number of alternatives that a deployment lists."""


class Simulated(msgspec.Struct, frozen=True):
    """A plan with its simulated step time in microseconds, or what that is at least."""

    step_us: float
    plan: Candidate
    at_least: bool = False
    """Whether `step_us` is a lower bound, with which the plan cannot win, so that it was not simulated."""
    busy_us: float = 0.0
    """See `busiest_us`; 0: not known."""


class Ranking(msgspec.Struct, frozen=True):
    """What was compared."""

    deployment: Deployment
    chosen: Candidate
    played: tuple[Simulated, ...]
    """All that were simulated or cannot win, the chosen one included, in the order of preference."""
    over: tuple[Candidate, ...]
    """Those that do not fit, the smallest first."""


def simulated_us(graph: TaskGraph, costs: CostTable, deployment: Deployment, options: PlanOptions) -> float:
    """Return the simulated step time of a deployment. The options say when and in which type gradients are reduced."""
    return _Played(graph, costs, deployment, options).step_us()


class _Played:
    """A deployment as the simulator has it."""

    def __init__(self, graph: TaskGraph, costs: CostTable, deployment: Deployment, options: PlanOptions) -> None:
        self.deployment = deployment
        links, overlap = (costs.link, costs.between), not options.sync_allreduce
        layout, self.costs = layout_and_costs(
            graph, deployment, *links, overlap=overlap, options=options, runtime=costs.runtime
        )
        self.layout = loss_layout(layout)

    def step_us(self) -> float:
        """Return the simulated time of a step."""
        return predict(self.deployment.schedule, self.layout, self.costs, memory=False).step_us

    def least_us(self, *, delays: bool) -> float:
        """Return a lower bound of it, for schedules that delay gradients of parameters and for those that do not."""
        return least_us(self.layout, self.costs, delayed=self.costs.split if delays else ())


def _work(variant: Variant, replicas: Sequence[int]) -> int:
    """Return the microbatches times stages of a simulation, where identical parts of the job count once."""
    return variant.microbatches * sum(replicas) * len(replicas) // math.gcd(*replicas)


def _considered(plans: Sequence[Candidate | EvenSplit]) -> Iterator[Candidate]:
    """Yield the plans to simulate that fit, those with the smallest E first, without computing E of all of them."""
    work = MOST_WORK
    seen: set[tuple[Variant, tuple[int, ...], tuple[int, ...]]] = set()
    waiting: list[tuple[float, int, Candidate | EvenSplit]] = []
    for number, plan in enumerate(plans):
        if isinstance(plan, EvenSplit):
            waiting.append((plan.least_us, number, plan))
        elif not plan.over_bytes:
            waiting.append((plan.choice.preference_us, number, plan))
    heapq.heapify(waiting)
    while waiting and len(seen) < MOST_PLAYED:
        _, number, plan = heapq.heappop(waiting)
        variant, starts, replicas = plan.of
        if (variant, starts, replicas) in seen or (len(seen) >= FEWEST_PLAYED and _work(variant, replicas) > work):
            continue
        if isinstance(plan, EvenSplit):
            found = plan.candidate()
            if found is not None:
                heapq.heappush(waiting, (found.choice.preference_us, number, found))
            continue
        seen.add((variant, starts, replicas))
        work -= _work(variant, replicas)
        yield plan


def rank(
    plans: Sequence[Candidate | EvenSplit],
    make: Callable[[Candidate], Deployment],
    graph: TaskGraph,
    costs: CostTable,
    options: PlanOptions,
    others: Callable[[Candidate], Iterable[Candidate]] = lambda plan: (),
) -> Ranking:
    """Return the fastest plan, in simulated time, that fits; of equal ones the first. The others are alternatives.

    Of plans with and without ZeRO, and under other schedules, see LEAST_GAIN.

    `others`: returns a plan under other schedules.
    """
    compared = _Compared(make, graph, costs, options)
    for plan in _considered(plans):
        compared.add(plan)
    compared.move_cuts()
    alike = compared.delayed(others)
    over = [plan for plan in plans if isinstance(plan, Candidate) and plan.over_bytes]
    over.sort(key=lambda plan: plan.over_bytes)
    played = compared.played
    chosen, deployment = played[0].plan, compared.deployment
    told: dict[tuple[int, ...], Alternative] = {}
    """The best plan for each tuple of replicas, with its own cuts and microbatches."""
    for other in played[1:]:
        plan = other.plan
        if plan.choice.replicas != chosen.choice.replicas:
            found = Alternative(plan.name, other.step_us, plan.most_bytes, 0, other.at_least, other.busy_us)
            told.setdefault(plan.choice.replicas, found)
    for plan in over:
        told.setdefault(plan.choice.replicas, Alternative(plan.name, 0.0, plan.most_bytes, plan.over_bytes))
    deployment = replace(deployment, step_us=played[0].step_us, alternatives=tuple(told.values())[:MOST_TOLD])
    return Ranking(deployment, chosen, (*played, *(each for each in alike if each.plan is not chosen)), tuple(over))


class _Compared:
    """Simulates plans, unless the best one so far is better than they can be."""

    def __init__(
        self, make: Callable[[Candidate], Deployment], graph: TaskGraph, costs: CostTable, options: PlanOptions
    ) -> None:
        self._make, self._graph, self._costs, self._options = make, graph, costs, options
        self.played: list[Simulated] = []
        """In the order of preference once `delayed` was called."""
        self._least: dict[int, float] = {}
        """Lower bounds of what plans take if they delay gradients of parameters, by their places in `played`."""
        self._below = math.inf
        """Preference of the best one,"""
        self._best: Candidate | None = None
        """and that."""

    def add(self, plan: Candidate, *, gain: float = 0.0) -> None:
        """Simulate a plan, if it may be better than all before.

        `gain`: the part of the best one's step that it has to save; otherwise it is not noted.
        """
        given, below = self._given(plan), (1 - gain) * self._below
        delays = plan.choice.variant.schedule in DELAYING
        busy_us = busiest_us(given.deployment)
        found = Simulated(given.least_us(delays=delays), plan, at_least=True, busy_us=busy_us)
        if _preference(found) < below:
            found = Simulated(given.step_us(), plan, busy_us=busy_us)
        if _preference(found) < below:
            self._below, self._best, self.deployment = _preference(found), plan, given.deployment
        elif gain:
            return
        if len(plan.choice.replicas) > 1:
            self._least[len(self.played)] = given.least_us(delays=True)
        self.played.append(found)

    def move_cuts(self) -> None:
        """Move the cuts of the best plan that are at its slowest stage, one place each, as long as it gets better.

        To E a stage that is the slowest costs the same wherever it is. But the first one hides what others fill.
        """
        work, tried = MOST_MOVING, {each.plan.of for each in self.played}
        while (best := self._best) is not None:
            each = [stage.estimate for stage in self.deployment.stages]
            slowest = max(range(len(each)), key=lambda number: each[number].forward_us + each[number].backward_us)
            for other in relieved(best, slowest):
                if other.of not in tried:
                    work -= _work(other.choice.variant, other.choice.replicas)
                    if work < 0:
                        return
                    tried.add(other.of)
                    self.add(other, gain=MOVED_GAIN)
            if self._best is best:
                return

    def delayed(self, others: Callable[[Candidate], Iterable[Candidate]]) -> list[Simulated]:
        """Sort the plans, compare the best with the same ones under other schedules, and return these.

        The fastest of those that save enough comes first of all plans then.
        """
        order = sorted(range(len(self.played)), key=lambda place: (_preference(self.played[place]), place))
        self.played, places = [self.played[place] for place in order], order
        below = (1 - LEAST_GAIN) * self.played[0].step_us
        alike: list[Simulated] = []
        simulated, work, best = 0, 0, None
        several = [(place, each) for place, each in zip(places, self.played, strict=True) if place in self._least]
        for number, (place, each) in enumerate(several):
            simulated += not each.at_least
            # Of those that were not simulated any may be among the fastest of them.
            promising = self._least[place] < below and (each.at_least or simulated <= MOST_ALIKE)
            if not promising and number >= MOST_ALIKE:
                continue
            for other in others(each.plan):
                found = Simulated(self._least[place], other, at_least=True)
                own = _work(other.choice.variant, other.choice.replicas)
                if promising and (not work or work + own <= MOST_WORK_ALIKE):
                    work += own
                    given = self._given(other)
                    least = given.least_us(delays=True)
                    found = Simulated(least, other, at_least=True)
                    if least < below:
                        found = Simulated(given.step_us(), other)
                    if found.step_us < below:
                        below, best, self.deployment = found.step_us, found, given.deployment
                alike.append(found)
        if best is not None:
            self.played.insert(0, best)
        return alike

    def _given(self, plan: Candidate) -> _Played:
        return _Played(self._graph, self._costs, self._make(plan), self._options)


def _preference(each: Simulated) -> float:
    return preference_us(each.plan.choice.variant.zero, each.step_us)
