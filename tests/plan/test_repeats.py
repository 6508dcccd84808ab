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
from test_simulate import random_step_costs

from rannd.errors import PlanError
from rannd.plan.layout import loss_layout
from rannd.plan.program import Layout
from rannd.plan.repeats import repeats
from rannd.plan.schedule import ALL_SCHEDULES, planned_program
from rannd.plan.simulate import predict, simulate


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


def test_blocks_that_lie_alike_on_nodes_are_one() -> None:
    layout = times(Layout(3, 1, ((0,), (1, 2)), ((-1, 0), (0, 1)), ((0, 1),)), 8)
    found = repeats(layout, tuple(slot // 8 for slot in range(24)))
    # Nodes end behind slots 7 and 15: in the third block after two of its slots, in the sixth after one.
    assert [(each.nodes, each.starts) for each in found] == [
        ((0, 0, 0), (0, 3, 9, 12, 18, 21)),
        ((0, 0, 1), (6,)),
        ((0, 1, 1), (15,)),
    ]
    assert [(each.nodes, len(each.starts)) for each in repeats(layout, ())] == [((), 8)]


def test_a_job_whose_replicas_lie_apart_is_one_block() -> None:
    layout = Layout(4, 2, ((0, 1), (2, 3)), ((0, 1),), ((0, 1),))
    (found,) = repeats(layout, ())
    assert found.layout == layout


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
    with pytest.raises(PlanError, match="no schedule is named 'zb'; use one of 1f1b, fill_drain, zb_h1"):
        predict("zb", layout, virtual(layout))
