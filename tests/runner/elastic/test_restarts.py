"""How often a job is started again."""

from __future__ import annotations

from rannd.runner.elastic.restarts import BARREN, Restarts


def test_failures_after_new_steps_are_followed_by_a_start_at_once() -> None:
    counted = Restarts(100)
    for step in range(1, 50):
        counted.note_step(step)
        assert counted.fail() == 0.0


def test_failures_without_a_new_step_wait_and_end() -> None:
    counted = Restarts(100)
    counted.note_step(10)
    waits = []
    while (wait := counted.fail()) is not None:
        waits.append(wait)
        counted.note_step(10)  # from the checkpoint to the same place again
    assert waits == [0.0, 2.0, 4.0], "the first one had made new steps"
    assert len(waits) == BARREN
    assert "without a new step" in counted.why()


def test_where_a_start_begins_is_no_progress() -> None:
    counted = Restarts(100)
    waits = []
    while (wait := counted.fail()) is not None:
        waits.append(wait)
        counted.begin(120)
    assert waits == [2.0, 4.0]


def test_other_hosts_are_a_new_chance() -> None:
    counted = Restarts(100)
    for _ in range(10):
        assert counted.fail() == 2.0
        counted.others()


def test_a_start_that_runs_for_long_has_done_something_whatever_it_tells() -> None:
    counted = Restarts(100)
    for _ in range(10):
        assert counted.fail(ran_s=3600.0) == 0.0


def test_there_is_a_maximum() -> None:
    counted = Restarts(2)
    for step in (1, 2):
        counted.note_step(step)
        assert counted.fail() is not None
    counted.note_step(3)
    assert counted.fail() is None
    assert "--max-restarts 2" in counted.why()


def test_none_are_wanted() -> None:
    counted = Restarts(0)
    counted.note_step(5)
    assert counted.fail() is None
