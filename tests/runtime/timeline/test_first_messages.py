"""How long the first messages of steps are on their way, from the clocks of two ranks."""

from __future__ import annotations

import msgspec
import pytest
from plan_graphs import GraphBuilder
from plan_instances import deploy

from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import Flight
from rannd.runtime.timeline.first_messages import FirstMessages, flights
from rannd.runtime.timeline.recorder import Doing, StepRow


def rank(slot: int, node: int, clock_ns: int, *, sent: int = 0, got: int = 0) -> FirstMessages:
    """A rank whose clock is ahead, which has sent, and got, these microseconds after the agreements of three steps."""
    rows = []
    for number, late in ((7, 0), (8, 10), (9, 500)):
        row = StepRow(number, 0)
        row.agreed_ns = clock_ns + number * 10**9
        if sent:
            row.firsts[Doing.SEND, 0, 1] = row.agreed_ns + sent * 1000
        if got:
            row.firsts[Doing.RECEIVE, 0, 1] = row.agreed_ns + (got + late) * 1000
            row.firsts[Doing.RECEIVE, -1, 1] = row.agreed_ns
        rows.append(row)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(FirstMessages.of(rows, slot, node)), type=FirstMessages)


@pytest.fixture
def two() -> Deployment:
    builder = GraphBuilder()
    value = builder.input()
    for layer in range(4):
        value = builder.op([value], params=[builder.param(1000)], flops=100_000, output=layer == 3)
    return deploy(builder.build(), 2, partition_num=2, pipeline_num=2, schedule="1f1b")


def test_the_middle_of_the_steps_counts(two: Deployment) -> None:
    ranks = [rank(0, 0, 0, sent=300), rank(1, 0, 0, got=350)]
    assert flights(ranks, two) == (Flight(0, 1, False, 60.0),)


def test_clocks_of_nodes_are_compared_by_the_agreements(two: Deployment) -> None:
    ranks = [rank(0, 0, 0, sent=300), rank(1, 1, 123_456_789, got=350)]
    assert flights(ranks, two) == (Flight(0, 1, True, 60.0),)
    assert flights([ranks[0], rank(1, 1, 0, got=200)], two) == (Flight(0, 1, True, 0.0),), "no time is negative"


def test_what_was_not_recorded_tells_nothing(two: Deployment) -> None:
    assert flights([rank(0, 0, 0, sent=300), rank(1, 0, 0)], two) == ()
    assert flights([rank(0, 0, 0), rank(1, 0, 0, got=350)], two) == ()
    one = msgspec.structs.replace(two, stages=(msgspec.structs.replace(two.stages[0], slots=(0, 1)),))
    assert flights([rank(0, 0, 0, sent=300), rank(1, 0, 0, got=350)], one) == ()
    both = tuple(msgspec.structs.replace(stage, slots=(0, 1)) for stage in two.stages)
    several = msgspec.structs.replace(two, stages=both)
    assert flights([rank(0, 0, 0, sent=300), rank(1, 0, 0, got=350)], several) == ()
