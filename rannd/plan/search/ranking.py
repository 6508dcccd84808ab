"""Re-ranks the best plans with the simulator: E does not model microbatches that queue behind each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import Alternative, Deployment
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import LEAST_GAIN, preference_us
from rannd.plan.search.candidates import Candidate
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.profile.costs import CostTable

MOST_PLAYED = 32
"""Maximum number of simulated plans, those with the smallest E."""
FEWEST_PLAYED = 4
MOST_WORK = 50_000
"""Maximum of microbatches times stages that are simulated in total, beyond the first few plans: a second or two."""
MOST_ALIKE = 4
"""Maximum number of these, the fastest, that are simulated under other schedules, too."""
MOST_TOLD = 8
"""Maximum number of alternatives that a deployment lists."""


class Simulated(msgspec.Struct, frozen=True):
    """A plan with its simulated step time in microseconds."""

    step_us: float
    plan: Candidate


class Ranking(msgspec.Struct, frozen=True):
    """What was compared."""

    deployment: Deployment
    chosen: Candidate
    played: tuple[Simulated, ...]
    """All that were simulated, the chosen one included, in the order of preference."""
    over: tuple[Candidate, ...]
    """Those that do not fit, the smallest first."""


def simulated_us(graph: TaskGraph, costs: CostTable, deployment: Deployment, options: PlanOptions) -> float:
    """Return the simulated step time of a deployment. The options say when and in which type gradients are reduced."""
    overlap = not options.sync_allreduce
    links = costs.link, costs.between
    given = step_costs(graph, deployment, *links, overlap=overlap, options=options, runtime=costs.runtime)
    return predict(deployment.schedule, loss_layout(layout_of(graph, deployment)), given).step_us


def _work(plan: Candidate) -> int:
    """Return the microbatches times stages of a simulation, where identical parts of the job count once."""
    replicas = plan.choice.replicas
    return plan.choice.variant.microbatches * sum(replicas) * len(replicas) // math.gcd(*replicas)


def rank(
    plans: Sequence[Candidate],
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
    work = MOST_WORK
    fits = sorted((plan for plan in plans if not plan.over_bytes), key=lambda plan: plan.choice.preference_us)
    played: list[tuple[float, int, Candidate, Deployment]] = []
    seen = set()
    for plan in fits:
        what = (plan.choice.variant, plan.choice.starts, plan.choice.replicas)
        if what in seen or len(played) == MOST_PLAYED or (len(played) >= FEWEST_PLAYED and _work(plan) > work):
            continue
        seen.add(what)
        work -= _work(plan)
        deployment = make(plan)
        step_us = simulated_us(graph, costs, deployment, options)
        played.append((step_us, len(played), plan, deployment))
    played.sort(key=lambda each: (preference_us(each[2].choice.variant.zero, each[0]), each[1]))
    several = [plan for _, _, plan, _ in played if len(plan.choice.replicas) > 1][:MOST_ALIKE]
    alike: list[Simulated] = []
    for other in [each for plan in several for each in others(plan)]:
        deployment = make(other)
        step_us = simulated_us(graph, costs, deployment, options)
        alike.append(Simulated(step_us, other))
        if step_us < (1 - LEAST_GAIN) * played[0][0]:
            played.insert(0, (step_us, len(played), other, deployment))
    step_us, _, chosen, deployment = played[0]
    told: dict[tuple[int, ...], Alternative] = {}
    """The best plan for each tuple of replicas, with its own cuts and microbatches."""
    for other_us, _, plan, _ in played[1:]:
        if plan.choice.replicas != chosen.choice.replicas:
            told.setdefault(plan.choice.replicas, Alternative(plan.name, other_us, plan.most_bytes, 0))
    over = sorted((plan for plan in plans if plan.over_bytes), key=lambda plan: plan.over_bytes)
    for plan in over:
        told.setdefault(plan.choice.replicas, Alternative(plan.name, 0.0, plan.most_bytes, plan.over_bytes))
    deployment = replace(deployment, step_us=step_us, alternatives=tuple(told.values())[:MOST_TOLD])
    simulated = [Simulated(step_us, plan) for step_us, _, plan, _ in played]
    return Ranking(deployment, chosen, (*simulated, *(each for each in alike if each.plan is not chosen)), tuple(over))
