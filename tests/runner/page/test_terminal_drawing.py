"""Memory and schedule of a plan in the terminal."""

from __future__ import annotations

import msgspec
import pytest
from shown_plans import planned

from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_text import bytes_text
from rannd.plan.simulate.plan_records import DrawnStep
from rannd.plan.simulate.simulator import Simulation
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, REDUCE, Event
from rannd.runner.page.terminal_drawing import MOST_LINES, drawn, memory_text, schedule_text


@pytest.fixture(scope="module")
def plan() -> Deployment:
    """Two stages, each on a node of its own."""
    return planned(world=2, partition_num=2, pipeline_num=2, memory=10**9)


def test_actions_have_their_names_where_these_have_room(plan: Deployment) -> None:
    """Twenty columns for 100 us. A number without room is left out, never cut; what is computed hides reductions."""
    events = (
        Event(0, COMPUTE, 0.0, 30.0, "F0"),
        Event(0, COMPUTE, 30.0, 10.0, "F11"),
        Event(0, COMPUTE, 60.0, 20.0, "B0"),
        Event(0, REDUCE, 70.0, 30.0, "R"),
        Event(1, RECEIVE, 0.0, 10.0, "RV0:0>1@0"),
        Event(1, COMPUTE, 10.0, 40.0, "F0"),
        Event(1, COMPUTE, 99.0, 1.0, "W0"),
    )
    step = DrawnStep(Simulation(100.0, (60.0, 41.0), (40.0, 59.0), (), events), (0, 1))
    assert schedule_text(plan, step, width=33).splitlines()[-2:] == [
        "0:0 stage 0  F0----F-....B0--RRRR",
        "1:0 stage 1  ..F0------.........W",
    ]


def test_reductions_have_no_digits_and_what_follows_them_is_explained(plan: Deployment) -> None:
    """Their stages would stand within them, where a computation hides the begin, or another reduction comes before."""
    events = (
        Event(0, COMPUTE, 0.0, 30.0, "B0"),
        Event(0, REDUCE, 25.0, 20.0, "R0"),
        Event(0, REDUCE, 45.0, 25.0, "R0,1"),
        Event(0, REDUCE, 70.0, 20.0, "G"),
    )
    step = DrawnStep(Simulation(100.0, (30.0, 0.0), (70.0, 100.0), (), events), (0, 1))
    *head, first, _ = schedule_text(plan, step, width=33).splitlines()
    assert max(map(len, head)) <= 33
    assert first == "0:0 stage 0  B0----RRRRRRRRGGGG.."
    assert "R reduction, G copies and gathering after it, . nothing" in " ".join(" ".join(head).split())
    without = DrawnStep(Simulation(100.0, (30.0, 0.0), (70.0, 100.0), (), events[:3]), (0, 1))
    assert "R reduction, . nothing" in schedule_text(plan, without)


def test_bars_show_memory_against_the_limit(plan: Deployment) -> None:
    sizes = [stage.estimate.used_bytes for stage in plan.stages]
    half = msgspec.structs.replace(plan, memory_bytes=2 * sizes[0])
    first, second = memory_text(half).splitlines()[1:]
    assert first == f"0:0 stage 0  {'#' * 16}{'.' * 16}  {bytes_text(sizes[0]):>10}   50 %"
    assert second.count("#") == round(32 * sizes[1] / (2 * sizes[0]))
    over = memory_text(msgspec.structs.replace(plan, memory_bytes=min(sizes) - 1)).splitlines()[1:]
    assert all(line.endswith("too much") for line in over)
    unknown = memory_text(msgspec.structs.replace(plan, memory_bytes=0))
    assert "%" not in unknown
    assert "#" * 32 in unknown


def test_lines_are_as_wide_as_the_terminal(plan: Deployment) -> None:
    for width in (70, 100):
        lines = drawn(plan, width).splitlines()
        assert max(map(len, lines)) <= width
        schedule = lines[-2:]
        assert [len(line) for line in schedule] == [width, width]
        assert all({"F", "B"} <= set(line) for line in schedule)


def test_a_plan_that_cannot_be_drawn_says_why(plan: Deployment) -> None:
    text = drawn(msgspec.structs.replace(plan, planned=None))
    assert "schedule  not drawn: The plan is of a version of rannd that did not store" in text
    assert text.startswith("memory")
    assert "not drawn: no schedule is named" in drawn(msgspec.structs.replace(plan, schedule="later"))


def test_devices_that_are_left_out_are_counted(plan: Deployment) -> None:
    world = MOST_LINES + 3
    one = msgspec.structs.replace(
        plan.stages[0], slots=tuple(range(world)), ops=(*plan.stages[0].ops, *plan.stages[1].ops)
    )
    many = msgspec.structs.replace(plan, slots=tuple(Slot(0, device) for device in range(world)), stages=(one,))
    step = DrawnStep(Simulation(1.0, (0.0,) * world, (1.0,) * world, (), ()), tuple(range(world)))
    lines = schedule_text(many, step).splitlines()
    assert len(lines) == 1 + MOST_LINES + 1
    assert lines[-1] == "and 3 more devices"
