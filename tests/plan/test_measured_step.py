"""Measured steps as bytes and as text: what comes back, that garbage does not, and how they compare with the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import DeploymentError
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import (
    MEASURED_FORMAT,
    MOST_EVENTS,
    EdgeWaits,
    MeasuredStep,
    RankTimes,
    StageTimes,
    Typical,
    decode_measured,
    encode_measured,
)
from rannd.plan.plan_text import show_measured, time_text


def some() -> Deployment:
    """Two stages of two replicas, whose backwards come in two halves."""
    made = deploy(chain(10), 4, rows=16, partition_num=2, pipeline_num=2)
    stages = []
    for stage in made.stages:
        halves = msgspec.structs.replace(stage.estimate, weight_us=stage.estimate.backward_us / 4)
        stages.append(msgspec.structs.replace(stage, estimate=halves))
    assert len(stages) == 2
    return msgspec.structs.replace(made, stages=tuple(stages))


def as_planned(deployment: Deployment, slower: float = 1.0, busy: float = 1.0) -> MeasuredStep:
    """What was measured if computations took `slower` times as long as planned, and all else nothing.

    `busy`: how much of that they would have taken without other processes.
    """
    ranks = []
    for slot in range(len(deployment.slots)):
        stages = []
        for number, stage in enumerate(deployment.stages):
            if slot in stage.slots:
                each = stage.estimate
                halves = (each.backward_us - each.weight_us, each.weight_us)
                times = [
                    Typical(slower * us / each.pieces, busy * slower * us / each.pieces)
                    for us in (each.forward_us, *halves)
                ]
                stages.append(StageTimes(number, each.pieces, *times))
        waits = (EdgeWaits(0, 1, 4, 3.0),)
        ranks.append(RankTimes(slot, 20, tuple(stages), waits, deployment.step_us - 5.0, 5.0 + slot, 0, 0, 0, 0, 7.0))
    return MeasuredStep(MEASURED_FORMAT, tuple(ranks))


def test_what_is_encoded_comes_back() -> None:
    assert decode_measured(encode_measured(as_planned(some())), some()) == as_planned(some())


def test_a_step_takes_as_long_as_the_slowest_rank_from_the_agreement_on() -> None:
    """An agreement takes the last rank to come the least."""
    deployment = some()
    assert as_planned(deployment).step_us == pytest.approx(deployment.step_us)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(flights=[[0, 9, False, 1.0]]), "from stage 0 to 9"),
        (lambda d: d.update(flights=[[0, 1, False, -1.0]]), "were -1.0 us on their way"),
        (lambda d: d.update(events=[[4, "compute", 0.0, 1.0, "F0"]]), "slot 4 did something for 1.0 us"),
        (lambda d: d.update(events=[[0, "compute", -1.0, 1.0, "F0"]]), "did something for 1.0 us at -1.0 us"),
        (lambda d: d.update(events=[[0, "compute", 0.0, math.nan, "F0"]]), "did something for nan us"),
        (lambda d: d.update(events=[[0, "compute", 0.0, 1.0, "F" * 65]]), "an event has a name of 65 characters"),
        (lambda d: d.update(events=[[0, "x" * 65, 0.0, 1.0, "F0"]]), "an event has a name of 65 characters"),
        (lambda d: d.update(events=[[0, "c", 0.0, 1.0, ""]] * (MOST_EVENTS + 1)), "8001 events, more than 8000"),
        (
            lambda d: d.update(format=MEASURED_FORMAT + 1),
            f"format {MEASURED_FORMAT + 1}, this version of rannd reads {MEASURED_FORMAT}",
        ),
        (lambda d: d.pop("ranks"), "missing required field `ranks`"),
        (lambda d: d["ranks"].pop(), "3 ranks, of 4 devices"),
        (lambda d: d["ranks"].reverse(), "4 ranks, of 4 devices"),
        (lambda d: d["ranks"][0].update(slot=-1), "4 ranks, of 4 devices"),
        (lambda d: d["ranks"][0].update(stages=[]), r"slot 0 has stages \[\], not \[0\]"),
        (lambda d: d["ranks"][3]["stages"][0].update(stage=0), r"slot 3 has stages \[0\], not \[1\]"),
        (lambda d: d["ranks"][0].update(step_us=math.nan), "step_us is nan"),
        (lambda d: d["ranks"][0].update(step_us=math.inf), "step_us is inf"),
        (lambda d: d["ranks"][0].update(step_us=-0.5), "step_us is -0.5"),
        (lambda d: d["ranks"][0].update(steps=-1), "steps is -1"),
        (lambda d: d["ranks"][0].update(steps=True), "Expected `int`"),
        (lambda d: d["ranks"][0]["stages"][0].update(pieces=1 << 60), "pieces is 1152921504606846976"),
        (lambda d: d["ranks"][0]["stages"][0].update(forward=[-1.0, 0.0]), "forward is -1.0"),
        (lambda d: d["ranks"][0].update(waits=[[0, 7, 1, 1.0]]), r"slot 0 waits for \[\(0, 7\)\]"),
        (lambda d: d["ranks"][0].update(waits=[[1, 0, 1, 1.0]]), r"slot 0 waits for \[\(1, 0\)\]"),
        (lambda d: d["ranks"][0].update(waits=[[-2, 0, 1, 1.0]]), r"slot 0 waits for \[\(-2, 0\)\]"),
        (lambda d: d["ranks"][0].update(waits=[[0, 1, -1, 1.0]]), r"slot 0 has got \[-1\] messages"),
        (lambda d: d["ranks"][0].update(waits=[[0, 1, 1, -1.0]]), "waits is -1.0"),
        (lambda d: d["ranks"][0].update(waits=[[0, 1, 1, 1.0]] * 2), "slot 0 waits for"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    told = msgspec.msgpack.decode(encode_measured(as_planned(some())))
    change(told)
    with pytest.raises(DeploymentError, match=f"not the measured times.*{message}"):
        decode_measured(msgspec.msgpack.encode(told), some())


@given(st.binary(max_size=200) | st.integers(0, 400).map(lambda cut: encode_measured(as_planned(some()))[:cut]))
def test_garbage_is_refused(data: bytes) -> None:
    whole = encode_measured(as_planned(some()))
    if data != whole:
        with pytest.raises(DeploymentError, match="not the measured times"):
            decode_measured(data, some())


def lines(text: str) -> dict[tuple[str, str], list[str]]:
    """(stage, what) -> the other columns."""
    found, stage = {}, ""
    for line in text.splitlines()[2:]:
        cells = [cell for cell in line.split("  ") if cell]
        if not line.startswith(" "):
            stage, *cells = cells
        found[stage.strip(), cells[0].strip()] = [cell.strip() for cell in cells[1:]]
    return found


def test_each_stage_has_what_was_predicted_beside_what_was_measured() -> None:
    deployment = some()
    text = show_measured(deployment, as_planned(deployment, slower=1.25))
    assert text.splitlines()[0] == (
        "measured  20 steps; the slowest replica of each stage; error: measured / predicted - 1"
    )
    found = lines(text)
    planned, measured, error = found["all", "step"]
    assert planned == measured
    assert error == "+0.0 %"
    for stage in ("0", "1"):
        assert found[stage, "forward"][-1] == found[stage, "backward"][-1] == "+25.0 %"
        assert found[stage, "of it weight grad"][-1] == "+25.0 %"
        assert len(found[stage, "not computing"]) == 3
        assert found[stage, "waiting for values"] == ["0.003 ms"]
        longest = 5 + max(deployment.stages[int(stage)].slots)
        assert found[stage, "waiting for the ranks"] == [f"0.{longest:03d} ms"]


def test_times_beside_other_processes_are_told_apart() -> None:
    deployment = some()
    text = show_measured(deployment, as_planned(deployment, slower=2.0, busy=0.5))
    assert text.startswith("measured  20 steps beside other processes, which made them longer; the slowest replica")
    planned = [stage.estimate.forward_us + stage.estimate.backward_us for stage in deployment.stages]
    found = lines(text)
    assert [found[stage, "of it, others' processes"] for stage in ("0", "1")] == [[time_text(us)] for us in planned]
    assert "others' processes" not in show_measured(deployment, as_planned(deployment))


def test_stages_of_one_device_share_what_is_not_computing() -> None:
    """Each stage has its computations, the device its waits."""
    deployment = some()
    together = tuple(msgspec.structs.replace(stage, slots=(0, 1, 2, 3)) for stage in deployment.stages)
    deployment = msgspec.structs.replace(deployment, stages=together)
    text = show_measured(deployment, as_planned(deployment))
    assert text.count("forward") == 2
    assert text.count("not computing") == 1


def test_a_step_of_which_nothing_is_known_has_no_error() -> None:
    deployment = some()
    nothing = MeasuredStep(
        MEASURED_FORMAT,
        tuple(
            RankTimes(rank.slot, 0, tuple(StageTimes(s.stage, 0, Typical(), Typical()) for s in rank.stages), (),
                      0, 0, 0, 0, 0, 0, 0)
            for rank in as_planned(deployment).ranks
        ),
    )  # fmt: skip
    assert "%" not in show_measured(deployment, nothing)
