"""Which step is saved after a failure, of what is left in memory, and by whom."""

from __future__ import annotations

from rannd.runner.elastic.rescue_plan import plan_rescue
from rannd.runner.watch.errand import HeldPart


def part(number: int, rank: int, size: int = 2, step: int | None = None, folder: str = "/c") -> HeldPart:
    return HeldPart(number, 10 + number if step is None else step, rank, size, folder)


def test_each_watcher_writes_its_own_part_of_the_newest_step() -> None:
    held = {0: [part(1, 0), part(2, 0), part(1, 1)], 1: [part(2, 1), part(1, 1), part(1, 0)]}
    order = plan_rescue(held, 5)
    assert order is not None
    assert (order.number, order.step, order.parts) == (2, 12, {0: [0], 1: [1]})
    assert order.folder.startswith("/c/step-00000012.rescued-")


def test_a_step_without_some_part_is_not_whole() -> None:
    order = plan_rescue({0: [part(2, 0), part(1, 0)], 1: [part(1, 1)]}, 5)
    assert order is not None
    assert order.number == 1
    assert plan_rescue({0: [part(2, 0)]}, 5) is None


def test_copies_stand_in_for_ranks_that_are_gone() -> None:
    """Ranks 2 and 3 are gone; whoever has least to do writes their parts."""
    held = {0: [part(1, each, 4) for each in (0, 2, 3)], 1: [part(1, each, 4) for each in (1, 2, 3)]}
    order = plan_rescue(held, -1)
    assert order is not None
    assert order.parts == {0: [0, 2], 1: [1, 3]}


def test_nothing_newer_than_the_last_checkpoint() -> None:
    held = {0: [part(1, 0, 1)]}
    assert plan_rescue(held, 11) is None
    assert plan_rescue(held, 10) is not None
    assert plan_rescue({}, -1) is None


def test_a_job_with_more_ranks_than_there_are_parts() -> None:
    held = {0: [part(number, 0, 1 << 20) for number in range(1000)]}
    assert plan_rescue(held, -1) is None


def test_the_later_of_two_trainings_counts() -> None:
    """A second training in the same processes begins with step 1, in another folder."""
    order = plan_rescue({0: [part(3, 0, 1, step=100, folder="/a"), part(4, 0, 1, step=1, folder="/b")]}, -1)
    assert order is not None
    assert (order.step, order.folder.partition("step")[0]) == (1, "/b/")
