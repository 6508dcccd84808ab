"""Who is asked to write what is left in memory, and who is asked next if that fails."""

from __future__ import annotations

import pytest

from rannd.runner.watch.errand import RescueOrder
from rannd.runner.watch.snapshot_rescue import Rescue


class Watchers:
    """Watchers 0 and 1 of one host, and 2, which has copies of their parts and they of its own."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.writing: dict[int, int] = {}
        order = RescueOrder(7, 12, "/c", {0: [0], 1: [1], 2: [2, 3]}, {0: [0, 2], 1: [1, 2], 2: [0, 1, 2], 3: [1, 2]})
        self.rescue = Rescue(order, self._ask, 1e6)

    def _ask(self, watcher: int, part: int) -> None:
        assert watcher not in self.writing, "it has not answered yet"
        self.writing[watcher] = part
        self.asked.append((watcher, part))

    def answer(self, watcher: int, error: str = "") -> None:
        del self.writing[watcher]
        self.rescue.take(watcher, error)


@pytest.fixture
def watchers() -> Watchers:
    return Watchers()


def test_all_write(watchers: Watchers) -> None:
    assert watchers.asked == [(0, 0), (1, 1), (2, 2)]
    for each in (0, 1, 2):
        watchers.answer(each)
    assert watchers.asked[3:] == [(2, 3)]
    assert not watchers.rescue.over
    watchers.answer(2)
    assert (watchers.rescue.over, watchers.rescue.error) == (True, "")


def test_another_watcher_writes_what_one_cannot(watchers: Watchers) -> None:
    watchers.answer(1)
    watchers.answer(0, "a: No space left on device")
    assert watchers.asked[3:] == [], "watcher 2 is still writing"
    watchers.answer(2)
    watchers.answer(2)
    assert watchers.asked[3:] == [(2, 3), (2, 0)]
    watchers.answer(2)
    assert (watchers.rescue.over, watchers.rescue.error) == (True, "")


def test_the_one_with_least_to_do_writes_for_one_that_is_gone(watchers: Watchers) -> None:
    watchers.answer(0)
    watchers.rescue.lose(2, "b: it does not answer")
    assert watchers.asked[3:] == [(0, 2)], "part 3 waits for watcher 1"
    watchers.answer(1)
    assert watchers.asked[4:] == [(1, 3)]
    watchers.answer(0)
    watchers.answer(1)
    assert (watchers.rescue.over, watchers.rescue.error) == (True, "")


def test_nobody_else_can_write_it(watchers: Watchers) -> None:
    watchers.rescue.lose(2, "b: it does not answer")
    watchers.answer(0)
    watchers.answer(1, "a: Permission denied")
    assert (watchers.rescue.over, watchers.rescue.error) == (True, "a: Permission denied")
    watchers.answer(0)
    assert len(watchers.asked) == 4, "nobody is asked any more"


def test_a_watcher_is_not_asked_twice_for_what_it_cannot_write(watchers: Watchers) -> None:
    watchers.answer(2, "b: Input/output error")
    assert watchers.rescue.error == ""
    watchers.answer(0)
    watchers.answer(0, "a: Input/output error")
    watchers.answer(1)
    watchers.answer(1, "a: No space left on device")
    assert watchers.rescue.over
    assert watchers.rescue.error == "a: No space left on device"
    assert watchers.asked == [(0, 0), (1, 1), (2, 2), (2, 3), (0, 2), (1, 2)]


def test_it_is_given_up_once(watchers: Watchers) -> None:
    watchers.rescue.give_up("it takes too long")
    watchers.rescue.lose(2, "b: it does not answer")
    watchers.answer(0, "a: Input/output error")
    assert (watchers.rescue.over, watchers.rescue.error) == (True, "it takes too long")
    assert len(watchers.asked) == 3


def test_an_answer_that_nobody_waits_for(watchers: Watchers) -> None:
    watchers.answer(0)
    watchers.rescue.take(0, "")
    assert not watchers.rescue.over
