"""Events of ranks with different clocks on one time axis."""

from __future__ import annotations

from rannd.plan.schedule.program import Action, ActionKind
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, WAIT, Event
from rannd.runtime.timeline.joined_timeline import CATEGORY, RankEvent, RankSteps, join, rank_events
from rannd.runtime.timeline.recorder import Doing

MS = 1_000_000


def rank(slot: int, node: int, ahead_ms: int, begin_ms: int, agreed: dict[int, int]) -> RankSteps:
    """Comes at `begin_ms` to a step, in which it computes from 20 to 25 ms; its clock is ahead."""
    ahead = ahead_ms * MS
    events = (RankEvent(COMPUTE, f"F{slot}", ahead + 20 * MS, ahead + 25 * MS),)
    return RankSteps(
        5, slot, node, ahead + begin_ms * MS, events, {step: ahead + at * MS for step, at in agreed.items()}
    )


def test_clocks_of_nodes_are_compared_by_the_ends_of_agreements() -> None:
    """One of which a rank left 7 ms late."""
    ranks = [
        rank(0, 0, 0, 11, {4: 5, 5: 10, 6: 15}),
        rank(1, 0, 0, 13, {4: 5, 5: 10, 6: 15}),
        rank(3, 1, 5000, 12, {4: 5, 5: 17, 6: 15}),
        rank(2, 1, 5000, 14, {4: 5, 5: 10, 6: 15}),
    ]
    events, came_us = join(ranks)
    assert events == [Event(slot, COMPUTE, 9000.0, 5000.0, f"F{slot}") for slot in range(4)]
    assert came_us == 3000.0


def test_ranks_of_a_node_have_one_clock_whenever_they_leave() -> None:
    ranks = [rank(0, 0, 0, 11, {4: 5}), rank(1, 0, 0, 11, {4: 9})]
    assert [event.start_us for event in join(ranks)[0]] == [9000.0, 9000.0]


def test_every_event_has_a_category_and_a_name() -> None:
    assert set(CATEGORY) == set(Doing) - {Doing.CALL}, "a call is no event"
    receive = Action(ActionKind.RECV_VALUES, 3, 0, 1, 0)
    assert rank_events([(Doing.RECEIVE, receive, 1, 2), (Doing.AGREE, None, 2, 3)]) == (
        RankEvent(RECEIVE, "RV3:0>1@0", 1, 2),
        RankEvent(WAIT, "agreement", 2, 3),
    )
    for doing in (Doing.REDUCE, Doing.DRAIN, Doing.SETTLE, Doing.AGREE):
        (event,) = rank_events([(doing, None, 0, 1)])
        assert event.name
