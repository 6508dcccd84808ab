"""What E and its memory say beside what the simulator plays: docs/planning.md reports the difference."""

from __future__ import annotations

import math

from test_stages import Instance

from rannd.plan.deployment import Deployment
from rannd.plan.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate import Simulation, predict


def played(instance: Instance, deployment: Deployment) -> Simulation:
    """One step of a deployment."""
    layout = loss_layout(layout_of(instance.graph, deployment))
    costs = step_costs(instance.graph, deployment, instance.costs.link, instance.costs.between)
    return predict(deployment.schedule, layout, costs)


def test_no_stage_needs_more_memory_than_was_planned() -> None:
    """But for gradients of a value that several stages read, which come from each of them and count once in E."""
    for seed in range(150):
        instance = Instance(seed)
        for limit in (10**15, math.ceil(instance.reference.smallest_memory() * 1.1)):
            deployment = instance.plan(limit)
            result = played(instance, deployment)
            for stage in deployment.stages:
                most = max(result.peak_bytes[slot] for slot in stage.slots)
                # Each size is rounded up, of each value and of each piece.
                assert most <= 1.02 * stage.estimate.total_bytes + 20 * stage.estimate.pieces, seed


def test_e_is_near_the_simulated_time() -> None:
    ratios = []
    for seed in range(200):
        instance = Instance(seed)
        deployment = instance.plan()
        if deployment.step_us > 0:
            ratios.append(played(instance, deployment).step_us / deployment.step_us)
    ratios.sort()
    assert ratios[0] > 0.6
    assert ratios[-1] < 1.15
    assert 0.95 < ratios[len(ratios) // 2] < 1.02
