"""The words for a wait, from what the ranks answer."""

from __future__ import annotations

import threading

import pytest

from rannd.runtime.failure import stack_dump
from rannd.runtime.failure.detector import FailureDetector
from rannd.runtime.failure.position import Where
from rannd.runtime.failure.side_channel import Stacks
from rannd.runtime.failure.wait_notice import collective, is_expected, names, notice


def answer(doing: str, call: str = "", line: str = "", still: float = 0.0, activity: str = "") -> Stacks:
    return Stacks(1, doing, "", "", "", call, line, activity, still)


WAITS = answer("waiting", "forward", "train.py:30", 60.0)
SAVES = answer("waiting", "state_dict", "train.py:41", 60.0)
SCRIPT = answer("script", "", "train.py:57")
TRACES = answer("working", "forward", "train.py:30", activity="tracing")
MOMENT = answer("waiting", "backward", "train.py:31", 0.2)


@pytest.mark.parametrize(
    ("answers", "silent", "left", "told"),
    [
        (
            {0: SAVES, 1: SCRIPT},
            (),
            (),
            "rank 0 waits for rank 1 in state_dict at train.py:41; rank 1 is in your code at train.py:57; state_dict "
            "is collective: all ranks have to call it; rank 0 gets the state",
        ),
        (
            {0: WAITS, 1: TRACES},
            (),
            (),
            "rank 0 waits for rank 1 in forward at train.py:30; rank 1 works in forward at train.py:30 (tracing)",
        ),
        (
            {0: WAITS, 1: MOMENT, 2: WAITS, 3: SAVES},
            (),
            (),
            "ranks 0 and 2 wait for rank 1 in forward at train.py:30; rank 3 waits in state_dict at train.py:41; "
            "rank 1 works in backward at train.py:31",
        ),
        (
            {0: WAITS},
            (2,),
            (1,),
            "rank 0 waits for ranks 1 and 2 in forward at train.py:30; rank 1 has ended its script; "
            "rank 2 does not answer: it is stopped, or native code holds the GIL",
        ),
        (
            {0: WAITS, 1: SAVES},
            (),
            (),
            "rank 0 waits in forward at train.py:30; rank 1 waits in state_dict at train.py:41",
        ),
        ({0: TRACES, 1: SCRIPT}, (), (), ""),
        ({1: WAITS}, (0,), (), ""),
    ],
)
def test_who_waits_for_whom(
    answers: dict[int, Stacks], silent: tuple[int, ...], left: tuple[int, ...], told: str
) -> None:
    """Rank 0 has asked; nothing is said where it does not wait any more."""
    assert notice(0, answers, silent, left) == told


def test_a_rank_that_works_inside_rannd_is_no_alarm() -> None:
    assert is_expected(0, {0: WAITS, 1: TRACES, 2: SCRIPT})
    assert not is_expected(0, {0: WAITS, 1: SCRIPT, 2: WAITS})
    assert not is_expected(0, {0: answer("waiting", "forward", "", 0.5), 1: SCRIPT})


def test_many_ranks_are_counted() -> None:
    assert names(range(1)) == "rank 0"
    assert names(range(3)) == "ranks 0, 1 and 2"
    assert names(range(63)) == "ranks 0, 1, 2 .. (63 of them)"
    line = notice(0, {0: WAITS} | dict.fromkeys(range(1, 64), SCRIPT), (), ())
    assert line.count("is in your code") == 8


def test_calls_of_the_model_need_no_word() -> None:
    assert collective("forward") == collective("backward") == collective("") == ""
    assert collective("save_checkpoint") == "save_checkpoint is collective: all ranks have to call it"


def test_zero_switches_it_off() -> None:
    """Then the thread that would tell sleeps until something happens."""
    watch = FailureDetector()
    assert watch._pause() is None
    watch._notice = 60.0
    assert watch._pause() == 5.0


def test_what_is_the_users_code_of_a_rank() -> None:
    where, found = Where(), []
    where.call = "barrier"

    def look() -> None:
        found.extend([stack_dump.user_line(where), stack_dump.entry(where), stack_dump.activity(where)])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[0].startswith("test_wait_notice.py:")
    assert found[1:] == ["barrier", ""]
