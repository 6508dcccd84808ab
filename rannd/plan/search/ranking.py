"""The best plans again, by the simulator: E does not see pieces that queue behind each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import Alternative, Deployment
from rannd.plan.search.candidates import Candidate
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.profile.costs import CostTable

MOST_PLAYED = 32
"""Plans that are simulated, those with the least E."""
FEWEST_PLAYED = 4
MOST_WORK = 50_000
"""Pieces times stages that are played in all, but for the first few plans: a second or two."""
MOST_TOLD = 8
"""Plans that a deployment tells of."""
WORTH = 0.99
"""Of the time of a step: plans that cannot be run yet are told of where they take less."""


def simulated_us(graph: TaskGraph, costs: CostTable, deployment: Deployment, *, overlap: bool) -> float:
    """Step of a deployment by the simulator. `overlap`: gradients are reduced while backward runs."""
    given = step_costs(graph, deployment, costs.link, costs.between, overlap=overlap)
    return predict(deployment.schedule, loss_layout(layout_of(graph, deployment)), given).step_us


def _work(plan: Candidate) -> int:
    """Pieces times stages that a simulation plays, of which equal parts of the job are played once."""
    replicas = plan.choice.replicas
    return plan.choice.variant.microbatches * sum(replicas) * len(replicas) // math.gcd(*replicas)


def rank(
    plans: Sequence[Candidate],
    make: Callable[[Candidate], Deployment],
    graph: TaskGraph,
    costs: CostTable,
    *,
    overlap: bool,
) -> Deployment:
    """The fastest of the plans that fit and can be run, in simulated time; it tells of the others. Of equals the first.

    Of those that cannot be run yet the ones that would be faster are told.
    """
    work = MOST_WORK
    fits = sorted((plan for plan in plans if not plan.over_bytes), key=lambda plan: plan.choice.step_us)
    played: list[tuple[float, int, Candidate, Deployment]] = []
    seen = set()
    for plan in [plan for plan in fits if plan.runs]:
        what = (plan.choice.variant, plan.choice.starts, plan.choice.replicas)
        if what in seen or len(played) == MOST_PLAYED or (len(played) >= FEWEST_PLAYED and _work(plan) > work):
            continue
        seen.add(what)
        work -= _work(plan)
        deployment = make(plan)
        step_us = simulated_us(graph, costs, deployment, overlap=overlap)
        played.append((step_us, len(played), plan, deployment))
    played.sort(key=lambda each: each[:2])
    step_us, _, chosen, deployment = played[0]
    later = [
        Alternative(plan.name, simulated_us(graph, costs, make(plan), overlap=overlap), plan.most_bytes, 0, False)
        for plan in fits
        if not plan.runs and plan.choice.step_us < step_us
    ]
    told: dict[tuple[int, ...], Alternative] = {}
    """The best of each kind: cuts and microbatches are its own."""
    for other_us, _, plan, _ in played[1:]:
        if plan.choice.replicas != chosen.choice.replicas:
            told.setdefault(plan.choice.replicas, Alternative(plan.name, other_us, plan.most_bytes, 0))
    for plan in sorted((plan for plan in plans if plan.over_bytes), key=lambda plan: plan.over_bytes):
        told.setdefault(plan.choice.replicas, Alternative(plan.name, 0.0, plan.most_bytes, plan.over_bytes))
    better = sorted((each for each in later if each.step_us < WORTH * step_us), key=lambda each: each.step_us)
    return replace(deployment, step_us=step_us, alternatives=(*tuple(told.values())[:MOST_TOLD], *better))
