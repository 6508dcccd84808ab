"""Timelines of a page: what they have of a step, and what they say where they have not all of it."""

from __future__ import annotations

import msgspec
import pytest
from shown_plans import measured, planned

from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import StepEvent
from rannd.plan.plan_text import bubble
from rannd.runner.page import page_timeline
from rannd.runner.page.page_data import KINDS, Timeline, TypicalStep
from rannd.runner.page.page_timeline import measured_timeline, predicted, predicted_timeline, slot_uses


@pytest.fixture(scope="module")
def plan() -> Deployment:
    return planned(partition_num=2, pipeline_num=4, memory=10**9)


def line(plan: Deployment) -> Timeline:
    step = predicted(plan).step
    assert step is not None
    return predicted_timeline(plan, step)


def test_a_timeline_has_the_events_of_the_step(plan: Deployment) -> None:
    step = predicted(plan).step
    assert step is not None
    found = line(plan)
    events = step.simulation.events
    assert len(found.events.start) == len(events)
    assert found.slots == ("0:0 stage 0", "0:1 stage 1", "1:0 stage 0", "1:1 stage 1")
    told = set(
        zip(
            found.events.slot,
            (found.events.names[name] for name in found.events.name),
            (round(start * found.unit_us, 0) for start in found.events.start),
            strict=True,
        )
    )
    for event in events:
        assert any(
            (slot, name) == (event.slot, event.name) and abs(start - event.start_us) < 2 * found.unit_us + 1
            for slot, name, start in told
        ), event
    kinds = {
        found.events.names[name][0]: KINDS[kind]
        for name, kind in zip(found.events.name, found.events.kind, strict=True)
        if kind < 3
    }
    assert kinds["F"] == "forward"
    assert kinds["B"] == "backward"


def test_events_that_were_recorded_are_the_measured_timeline(plan: Deployment) -> None:
    found = measured_timeline(plan, measured(plan, 2.0, events=True), range(4))
    assert found is not None
    assert found.note.startswith("one step, as ranks recorded it, from its begin on the first rank;")
    assert found.what == "one recorded step"
    assert found.typical == TypicalStep("the median of 20 steps", measured(plan, 2.0).step_us)
    assert found.step_us == pytest.approx(2 * line(plan).step_us, rel=0.05)
    assert len(found.events.start) == len(line(plan).events.start)


def test_without_events_it_is_drawn_from_medians_and_says_so(plan: Deployment) -> None:
    found = measured_timeline(plan, measured(plan, 2.0), range(4))
    assert found is not None
    assert "drawn from medians of 20 steps" in found.note
    assert found.what == "simulated with the measured forwards and backwards"
    assert found.typical == TypicalStep("the median of 20 steps", measured(plan, 2.0).step_us)
    assert "simulated" in found.note
    ours = line(plan)

    def computed(each: Timeline) -> float:
        events = each.events
        return sum(length for length, kind in zip(events.length, events.kind, strict=True) if kind < 3) * each.unit_us

    assert computed(found) == pytest.approx(2 * computed(ours), rel=0.02)


def test_events_of_unknown_kinds_are_others(plan: Deployment) -> None:
    took = msgspec.structs.replace(measured(plan), events=(StepEvent(0, "<b>", 0.0, 1.0, "x" * 60),))
    found = measured_timeline(plan, took, range(4))
    assert found is not None
    assert [KINDS[kind] for kind in found.events.kind] == ["other"]
    assert len(found.events.names[0]) <= 40


def test_of_too_many_events_transfers_are_left_out(plan: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = line(plan)
    computations = sum(kind in (0, 1, 2, 4) for kind in whole.events.kind)
    monkeypatch.setattr(page_timeline, "MOST_EVENTS", computations)
    found = line(plan)
    assert found.note == "transfers are left out"
    assert len(found.events.start) == computations
    monkeypatch.setattr(page_timeline, "MOST_EVENTS", computations - 5)
    assert line(plan).note == "transfers are left out; the last 5 events, too"
    monkeypatch.setattr(page_timeline, "MOST_SLOTS", 3)
    found = line(plan)
    assert "the first 3 of 4 devices" in found.note
    assert len(found.slots) == 3
    assert max(found.events.slot) == 2


def test_devices_spend_all_of_the_step(plan: Deployment) -> None:
    step = predicted(plan).step
    assert step is not None
    uses = slot_uses(plan, step)
    assert [each.stages for each in uses] == ["0", "1"]
    assert sum(each.critical for each in uses) >= 1
    for each in uses:
        parts = each.forward_us + each.backward_us + each.reduce_us + each.idle_us
        assert parts == pytest.approx(step.simulation.step_us)
        assert each.forward_us > 0
    longest = max(uses, key=lambda each: each.forward_us + each.backward_us)
    assert longest.critical
    assert [each.count for each in uses] == [2, 2]


def test_devices_compute_what_the_plan_says_that_they_do(plan: Deployment) -> None:
    """Not what the simulation counts as busy, which has the runtime's part of each action."""
    step = predicted(plan).step
    assert step is not None
    uses = slot_uses(plan, step)
    computed = sum(each.count * (each.forward_us + each.backward_us) for each in uses)
    assert computed / (len(plan.slots) * plan.step_us) == pytest.approx(1 - bubble(plan))
    assert computed < sum(step.simulation.busy_us) - 1


def test_a_step_that_cannot_be_simulated_says_why(plan: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not store" in predicted(msgspec.structs.replace(plan, planned=None)).why
    assert "no schedule is named 'later'" in predicted(msgspec.structs.replace(plan, schedule="later")).why
    monkeypatch.setattr(page_timeline, "MOST_COMPUTATIONS", 10)
    assert "more than 10 forwards and backwards" in predicted(plan).why
