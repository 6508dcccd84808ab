"""When ranks take a better plan in the middle of a training."""

from __future__ import annotations

import pytest

from rannd import log
from rannd.daemon.common.keys import make_key
from rannd.runtime.planning.plan_ahead import Better
from rannd.runtime.planning.replanning import NEXT, NOW, Replanning

BETTER = Better("2 stages", 90e3, 100e3, make_key("deployment", {"graph": "0"}), 1 << 30, b"plan")
"""Saves 10 ms a step."""


def call(ranks: list[Replanning], step: int, *ready: bool, as_planned: bool = True) -> list[bool]:
    """One call of all ranks, of which these are between steps."""
    told = [rank.told(step, ready=each) for rank, each in zip(ranks, ready, strict=True)]
    for rank in ranks:
        rank.heard(told)
    taken = [rank.take(as_planned=as_planned) for rank in ranks]
    for rank, each in zip(ranks, taken, strict=True):
        if each:
            rank.tell_taken(None)
    return taken


def test_all_ranks_take_it_before_the_same_step_and_once() -> None:
    ranks = [Replanning(NOW, None), Replanning(NEXT, None), Replanning(NOW, None)]  # rank 0's configuration counts
    assert call(ranks, 0, True, True, True) == [False] * 3
    ranks[0].found(BETTER)
    for ready in ((False, True, True), (True, False, True), (True, True, False)):
        assert call(ranks, 1, *ready) == [False] * 3
    assert call(ranks, 2, True, True, True, as_planned=False) == [False] * 3, "the last mini-batch of an epoch, say"
    assert call(ranks, 2, True, True, True) == [True] * 3
    assert call(ranks, 3, True, True, True) == [False] * 3
    ranks[0].found(BETTER)
    assert call(ranks, 4, True, True, True) == [False] * 3, "a training changes its plan once"


def test_a_plan_that_was_not_taken_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    for took in (False, True):
        rank = Replanning(NOW, None)
        rank.found(BETTER)
        call([rank], 1, took)
        caplog.clear()
        with caplog.at_level("INFO", logger=log.get("RaNNCModule").name):
            del rank
        assert [each.message.split(":")[0] for each in caplog.records] == ["The next run takes the better plan"] * (
            not took
        )


def test_a_training_whose_steps_were_not_measured_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    for replan, measured, told in ((NOW, False, 1), (NOW, True, 0), (NEXT, False, 0)):
        rank = Replanning(replan, None)
        rank.await_steps(20)
        if measured:
            rank.steps_measured()
        rank.await_steps(20)  # of the better plan, which may run for fewer
        caplog.clear()
        del rank
        assert [each.message.split(":")[0] for each in caplog.records] == ["replan=now had no effect"] * told


def test_the_next_run_takes_it_unless_asked_otherwise() -> None:
    rank = Replanning(NEXT, None)
    rank.found(BETTER)
    assert call([rank], 9, True) == [False]


@pytest.mark.parametrize(("step", "taken"), [(399, True), (401, False), (1200, False)])
def test_what_remains_has_to_save_more_than_the_change_takes(step: int, taken: bool) -> None:
    rank = Replanning(NOW, 1000)
    rank.moving_s = 3.0
    rank.found(BETTER)
    assert call([rank], step, True) == [taken]
    assert call([rank], step + 1, True) == [False]


def test_the_last_agreement_counts() -> None:
    """A graph may have been traced in between, or the call before has raised an error that the script has caught."""
    rank = Replanning(NOW, 1000)
    rank.found(BETTER)
    rank.heard([rank.told(5, ready=True)])
    rank.heard([rank.told(5, ready=False)])
    assert not rank.take(as_planned=True)
    rank.heard([rank.told(6, ready=True)])
    rank.heard([rank.told(6, ready=True)])
    assert rank.take(as_planned=True)


def test_a_rank_that_lacks_memory_for_the_whole_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [Replanning(NOW, None), Replanning(NOW, None)]
    ranks[0].found(BETTER)
    told = [rank.told(7, ready=True) for rank in ranks]
    with caplog.at_level("WARNING"):
        for rank in ranks:
            rank.heard(told)
            assert rank.take(as_planned=True)
            rank.tell_taken((3 << 30, 1 << 30))
    assert [each.message for each in caplog.records if "needs" in each.message] == [
        "The next run takes the better plan: for a change each rank has the whole model for a while, which needs "
        "3 GiB with the memory of the plan, but only 1 GiB are free"
    ]
    assert call(ranks, 8, True, True) == [False, False]
