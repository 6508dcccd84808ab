"""The bound that the ranking leaves plans out by: no simulated step is below it, and for some it is the step."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_costs import chain, virtual
from plan_layouts import Make, interleaved, layouts
from test_simulator import random_step_costs

from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.schedules import ALL_SCHEDULES, DELAYING, planned_program
from rannd.plan.simulate.layout import loss_layout
from rannd.plan.simulate.least_time import least_us
from rannd.plan.simulate.simulator import predict, predict_order, simulate
from rannd.plan.simulate.step_costs import StepCosts


def somewhere(layout: Layout, random: Random) -> StepCosts:
    """Random costs on nodes of random sizes, with or without time of the host and steps after the reductions."""
    costs = random_step_costs(layout, random)
    node = random.randint(1, 6)
    return msgspec.structs.replace(
        costs,
        nodes=tuple(slot // node for slot in range(layout.world)),
        far_values_us={edge: us + random.choice([-0.5, 0.0, 5.0]) for edge, us in costs.values_us.items() if us >= 0.5}
        | {edge: us for edge, us in costs.values_us.items() if us < 0.5},
        far_grads_us={edge: us + random.choice([0.0, 5.0]) for edge, us in costs.grads_us.items()},
        host_us=random.choice([0.0, 0.25]),
        byte_us=random.choice([0.0, 0.25]),
        agreeing_us=2.0,
        after_us=random.choice([(), tuple(float(random.randint(0, 9)) for _ in layout.stages)]),
    )


@given(layouts().map(loss_layout), st.sampled_from([*ALL_SCHEDULES]), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=500)
def test_no_simulated_step_is_below_the_bound(layout: Layout, schedule: str, random: Random) -> None:
    costs = somewhere(layout, random)
    delayed = costs.split if schedule in DELAYING else ()
    step_us = simulate(planned_program(schedule, layout, costs.split), costs).step_us
    assert least_us(layout, costs, delayed=delayed) <= step_us


def test_reductions_come_in_the_order_of_stages() -> None:
    """Those that stages 0 and 2 share before stage 2's own, which stage 0 does not wait for."""
    stages = tuple((slot,) for slot in range(4))
    layout = Layout(4, 1, stages, ((-1, 0),), (), ((0, 2),))
    costs = virtual(layout, reduce_us=((), (), (50.0,), ()), tied_us=((3.0,),), after_us=(70.0, 0.0, 0.0, 0.0))
    step_us = simulate(planned_program("gpipe", layout, costs.split), costs).step_us
    assert 0 < least_us(layout, costs) <= step_us


@given(interleaved(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=300)
def test_nor_with_several_stages_a_slot(case: tuple[Layout, Make], random: Random) -> None:
    layout, make = case
    costs = somewhere(layout, random)
    assert least_us(layout, costs, delayed=range(len(layout.stages))) <= predict_order(make, layout, costs).step_us


@pytest.mark.parametrize("replicas", [1, 3])
def test_of_equal_stages_it_is_the_step(replicas: int) -> None:
    stages = tuple(tuple(range(stage, 4 * replicas, 4)) for stage in range(4))
    layout = msgspec.structs.replace(chain(4, 5), world=4 * replicas, stages=stages)
    reduce_us = ((), (7.0,), (3.0, 4.0), ())
    costs = virtual(layout, reduce_us=reduce_us, after_us=(0.0, 0.0, 1.0, 2.0), agreeing_us=3.0)
    assert least_us(layout, costs) == pytest.approx(predict("1f1b", layout, costs).step_us)
    one = Layout(4, 5, ((0, 1, 2, 3),), (), ())
    reduced = virtual(one, reduce_us=((3.0, 40.0, 8.0),))
    assert least_us(one, reduced) == pytest.approx(predict("1f1b", one, reduced).step_us)


def test_inputs_and_gradients_pass_the_other_stages() -> None:
    layout = chain(3, 1, world=3)
    slow = virtual(layout, transfer=5.0, forward_us=(1.0, 2.0, 30.0), backward_us=(3.0, 4.0, 60.0))
    assert least_us(layout, slow) == pytest.approx(predict("1f1b", layout, slow).step_us)
    assert predict("1f1b", layout, slow).step_us == 1 + 5 + 2 + 5 + 3 * 90 + 5 + 4 + 5 + 3
