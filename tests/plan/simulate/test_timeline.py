"""Timelines as JSON for Chrome's trace viewer and Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict

from plan_costs import virtual

from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.simulate.simulator import simulate
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, Event, chrome_trace, chrome_traces

LAYOUT = Layout(3, 2, ((0,), (1, 2)), ((-1, 0), (0, 1)), ((0, 1),))


def test_one_event() -> None:
    trace = json.loads(chrome_trace([Event(1, COMPUTE, 5.0, 2.5, "F3")], (0, 4), title="predicted"))
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "predicted node 0"}},
        {"ph": "M", "name": "process_name", "pid": 4, "tid": 0, "args": {"name": "predicted node 4"}},
        {"ph": "M", "name": "thread_name", "pid": 4, "tid": 0, "args": {"name": "slot 1 compute"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 4, "tid": 0, "args": {"sort_index": 5000}},
        {"ph": "X", "name": "F3", "cat": "compute", "pid": 4, "tid": 0, "ts": 5.0, "dur": 2.5},
    ]


def test_timelines_of_one_time_axis_have_processes_of_their_own() -> None:
    measured, predicted = Event(1, COMPUTE, 5.0, 2.5, "F3"), Event(1, COMPUTE, 6.0, 2.0, "F3")
    trace = json.loads(chrome_traces({"measured": [measured], "predicted": [predicted]}, (0, 4)))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in trace if each["name"] == "process_name"}
    assert names == {0: "measured node 0", 4: "measured node 4", 5: "predicted node 0", 9: "predicted node 4"}
    found = [each for each in trace if each["ph"] == "X"]
    assert [(names[each["pid"]], each["ts"], each["dur"]) for each in found] == [
        ("measured node 4", 5.0, 2.5),
        ("predicted node 4", 6.0, 2.0),
    ]
    assert len({each["tid"] for each in found}) == 2


def test_measured_events_that_touch_share_a_thread() -> None:
    """Times of a clock in nanoseconds, divided."""
    events = [Event(0, COMPUTE, at / 1e3, 100 / 1e3, "F0") for at in range(0, 100_000, 100)]
    trace = json.loads(chrome_trace(events, (0,)))["traceEvents"]
    assert len({each["tid"] for each in trace if each["ph"] == "X"}) == 1


def test_messages_that_overlap_have_threads_of_their_own() -> None:
    events = [Event(0, RECEIVE, start, 10.0, f"RV{start:g}:0>1@1") for start in (0.0, 5.0, 10.0, 15.0)]
    trace = json.loads(chrome_trace(events, (0,)))
    names = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
    assert [names[each["tid"]] for each in trace["traceEvents"] if each["ph"] == "X"] == [
        "slot 0 receive",
        "slot 0 receive 2",
        "slot 0 receive",
        "slot 0 receive 2",
    ]


def test_a_simulated_step_has_all_of_its_actions_and_no_thread_two_at_once() -> None:
    costs = virtual(LAYOUT, unit=10.0, transfer=7.0, reduce_us=((), (3.0, 4.0)))
    program = planned_program("zb_h1", LAYOUT, {0})
    result = simulate(program, costs, record=True)
    trace = json.loads(chrome_trace(result.events, (0, 0, 1)))["traceEvents"]
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    found = defaultdict(list)
    for each in trace:
        if each["ph"] == "X":
            found[threads[each["pid"], each["tid"]]].append(each)
    for events in found.values():
        ends = 0.0
        for each in sorted(events, key=lambda each: each["ts"]):
            assert each["ts"] >= ends
            ends = each["ts"] + each["dur"]
        assert ends <= result.step_us
    for slot, actions in enumerate(program.slots):
        names = {each["name"] for thread, events in found.items() if f"slot {slot} " in thread for each in events}
        # One replica has nobody to reduce with.
        wanted = {str(action) for action in actions if action.kind.value[0] != "S"} - ({"R"} if slot == 0 else set())
        assert names == wanted
