"""What is predicted from one of the equal blocks of a job is what playing all of it gives."""

from __future__ import annotations

import time
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_costs import virtual
from plan_layouts import layouts
from test_simulator import random_step_costs

from rannd.errors import PlanError
from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.schedules import ALL_SCHEDULES, planned_program
from rannd.plan.simulate.layout import loss_layout
from rannd.plan.simulate.repeats import repeats
from rannd.plan.simulate.simulator import predict, simulate


def times(layout: Layout, count: int) -> Layout:
    """A job of `count` blocks that are `layout`."""
    return Layout(
        layout.world * count,
        layout.microbatches,
        tuple(
            tuple(slot + block * layout.world for block in range(count) for slot in slots) for slots in layout.stages
        ),
        layout.edges,
        layout.grad_edges,
        layout.tied,
    )


@given(
    layouts(max_world=4).map(loss_layout),
    st.integers(1, 4),
    st.sampled_from([*ALL_SCHEDULES]),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_prediction_is_what_the_whole_simulation_says(
    block: Layout, count: int, schedule: str, node: int, random: Random
) -> None:
    layout = times(block, count)
    costs = random_step_costs(layout, random)
    far = {edge: us + random.choice([0.0, 5.0]) for edge, us in costs.values_us.items()}
    nodes = tuple(slot // node for slot in range(layout.world))
    costs = msgspec.structs.replace(costs, nodes=nodes, far_values_us=far)
    whole = simulate(planned_program(schedule, layout, costs.split), costs)
    assert predict(schedule, layout, costs) == whole


@given(
    layouts(max_world=4).map(loss_layout),
    st.integers(1, 4),
    st.sampled_from([*ALL_SCHEDULES]),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_it_is_wherever_slots_lie(block: Layout, count: int, schedule: str, node: int, random: Random) -> None:
    layout = times(block, count)
    order = random.sample(range(layout.world), layout.world)
    stages = tuple(tuple(order[slot] for slot in slots) for slots in layout.stages)
    layout = msgspec.structs.replace(layout, stages=stages)
    costs = random_step_costs(layout, random)
    far = {edge: us + random.choice([0.0, 5.0]) for edge, us in costs.grads_us.items()}
    nodes = tuple(slot // node for slot in range(layout.world))
    costs = msgspec.structs.replace(costs, nodes=nodes, far_grads_us=far)
    whole = simulate(planned_program(schedule, layout, costs.split), costs)
    assert predict(schedule, layout, costs) == whole


def test_blocks_that_lie_alike_on_nodes_are_one() -> None:
    layout = times(Layout(3, 1, ((0,), (1, 2)), ((-1, 0), (0, 1)), ((0, 1),)), 8)
    found = repeats(layout, tuple(slot // 8 for slot in range(24)))
    # Nodes end behind slots 7 and 15: in the third block after two of its slots, in the sixth after one.
    assert [(each.nodes, [place[0] for place in each.places]) for each in found] == [
        ((0, 0, 0), [0, 3, 9, 12, 18, 21]),
        ((0, 0, 1), [6]),
        ((0, 1, 1), [15]),
    ]
    assert [(each.nodes, len(each.places)) for each in repeats(layout, ())] == [((), 8)]


def test_ranks_of_a_block_may_have_their_slots_in_others() -> None:
    # Stage 0 is on slots 0 to 3, stage 1 on 4 to 7; replica 2 of each runs the pieces of ranks 4 and 5.
    layout = Layout(8, 2, ((0, 1, 2, 3), (4, 5, 6, 7)), ((-1, 0), (0, 1), (1, 2)), ((0, 1),))
    found = {place: each.block for each in repeats(layout, ()) for place in each.places}
    assert {place: block.ranks for place, block in found.items()} == {
        (0, 4, 1): (0, 2),
        (1, 5, 2, 3): (2, 3),
        (2, 6, 4, 5): (2, 3),
        (3, 7, 6): (2, 1),
    }
    assert all(block.stages == ((0,), (1,)) for block in found.values())


def test_inputs_that_hold_up_another_block_s_messages_are_seen() -> None:
    # Rank 1 is in slot 1 and gives piece 1 to slot 2, which takes long. In its own block slot 1 is soon done, and sends
    # rank 2 its output over the same link: behind the input.
    layout = Layout(4, 1, ((2, 3), (0, 1)), ((-1, 0), (0, 1), (1, 2)), ((0, 1),))
    near = dict.fromkeys(layout.edges, 0.0)
    costs = virtual(layout, values_us=near, far_values_us=near | {(-1, 0): 1000.0}, nodes=(0, 0, 1, 1))
    whole = simulate(planned_program("1f1b", layout), costs, record=True)
    (output,) = [event for event in whole.events if event.name == "RV2:1>2@1"]
    assert output.start_us == 1000
    assert predict("1f1b", layout, costs) == msgspec.structs.replace(whole, events=())


def test_a_job_of_16384_devices_is_predicted_at_once() -> None:
    edges = tuple((stage, stage + 1) for stage in range(-1, 8))
    layout = times(Layout(8, 2, tuple((stage,) for stage in range(8)), edges, edges[1:-1]), 2048)
    start = time.perf_counter()
    result = predict("1f1b", layout, virtual(layout, unit=1 / 2048, nodes=tuple(slot // 8 for slot in range(16384))))
    assert time.perf_counter() - start < 10
    assert result.step_us == (16 + 7) * 3
    assert len(result.busy_us) == 16384


def test_a_schedule_that_is_not_known() -> None:
    layout = Layout(1, 1, ((0,),), (), ())
    with pytest.raises(PlanError, match="no schedule is named 'zb'; use one of 1f1b, gpipe, zb_h1"):
        predict("zb", layout, virtual(layout))
