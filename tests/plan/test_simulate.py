from __future__ import annotations

import math

import pytest
from test_stages import Instance

from rannd.errors import PlanError
from rannd.graph.ir import TaskGraph
from rannd.plan.check import check
from rannd.plan.deployment import Deployment
from rannd.plan.layout import layout_of, step_costs
from rannd.plan.schedule import Layout, fill_drain, from_text
from rannd.plan.simulate import Simulation, StepCosts, simulate
from rannd.profile.costs import LinkCost

PIPELINE = Layout(2, 1, ((0,), (1,)), ((0, 1),), ((0, 1),))


def costs(**changes: object) -> StepCosts:
    given = {
        "forward_us": (10.0, 10.0),
        "backward_us": (20.0, 20.0),
        "reduce_us": (0.0, 0.0),
        "values_us": {(0, 1): 0.0},
        "grads_us": {(0, 1): 0.0},
        "kept_bytes": (5, 7),
        "working_bytes": (0, 0),
    }
    return StepCosts(**(given | changes))  # type: ignore[arg-type]


def test_two_stages_two_pieces() -> None:
    # slot 0: F0 F1 . . . . . B1B1 B0B0      0         10        20        30 ..
    # slot 1: .  F0 F1 B1B1 B0B0 . .         forward ends at 30, backward takes 20 + 20 + 20
    assert simulate(fill_drain(PIPELINE), costs()) == Simulation(
        step_us=90, busy_us=(60, 60), idle_us=(30, 30), peak_bytes=(10, 14)
    )
    assert simulate(fill_drain(PIPELINE), costs()).bubble == pytest.approx(1 / 3)


def test_a_receive_takes_the_receiver_s_time_and_the_sender_goes_on() -> None:
    # slot 0: F0 at 0..10, F1 at 10..20; slot 1: receives 10..13, F0 ..23, receives ..26, F1 ..36;
    # then B1 ..56, B0 ..76; slot 0: receives 56..60, B1 ..80, receives 80..84, B0 ..104.
    result = simulate(fill_drain(PIPELINE), costs(values_us={(0, 1): 3.0}, grads_us={(0, 1): 4.0}))
    assert result.step_us == 104


def test_a_reduction_waits_for_all_replicas_of_its_stage() -> None:
    layout = Layout(3, 1, ((0, 1), (2,)), ((0, 1),), ())
    result = simulate(fill_drain(layout), costs(reduce_us=(100.0, 0.0), forward_us=(10.0, 1.0)))
    # Slot 0 has pieces 0 and 1: 2 * (10 + 20), and the reduction; slot 2 has three pieces to take.
    assert result.step_us == 160
    assert result.busy_us == (60, 30, 63)


def test_recompute_keeps_one_piece_s_activations() -> None:
    result = simulate(fill_drain(PIPELINE), costs(kept_bytes=(0, 7), working_bytes=(5, 0)))
    assert result.peak_bytes == (5, 14)


def test_inputs_are_posted_together() -> None:
    layout = Layout(2, 1, ((0,), (1,)), ((-1, 0), (-1, 1)), ())
    result = simulate(fill_drain(layout), costs(values_us={(-1, 0): 7.0, (-1, 1): 8.0}))
    # Slot 1 gets piece 0 and gives piece 1: its own receive holds up nothing.
    assert result.step_us == 8 + 2 * 10 + 2 * 20


def test_a_program_that_hangs_is_an_error() -> None:
    hanging = from_text("world 2 microbatches 1\nstages 0 | 1\nedges 0>1\nslot 0: F0 F1 | R\nslot 1: RV0:0>1@0 | R\n")
    with pytest.raises(PlanError, match="never ends: slot 1 at RV0:0>1@0"):
        simulate(hanging, costs())


def simulated(graph: TaskGraph, link: LinkCost, deployment: Deployment) -> Simulation:
    program = fill_drain(layout_of(graph, deployment))
    check(program)
    return simulate(program, step_costs(graph, deployment, link))


def test_peak_memory_is_what_the_estimate_says() -> None:
    for seed in range(100):
        instance = Instance(seed)
        deployment = instance.plan(math.ceil(instance.reference.smallest_memory() * 1.1))
        peaks = simulated(instance.graph, instance.costs.link, deployment).peak_bytes
        for stage in deployment.stages:
            most = max(peaks[slot] for slot in stage.slots)
            # Each piece's bytes are rounded up.
            assert abs(most - stage.estimate.activation_bytes) <= instance.world * deployment.microbatches
