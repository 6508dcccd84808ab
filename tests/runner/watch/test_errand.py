"""An errand beside a running job: it hears the ranks' notes, lets them leave, and notices from outside reach them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from idle_errand import IdleErrand
from monitored import run

from rannd.runner.watch.line_channel import Listener

NOTES = """
import os
from rannd.ranks import rank_notes
rank_notes.tell(step=3)
fd = int(os.environ[rank_notes.VARIABLE].partition(":")[0])
for line in (b"no JSON", b"[1, 2]", b'{"step": ' + b" " * 5000 + b"1}", b"\\xff", b"", b'{"step": 4}'):
    os.write(fd, line + b"\\n")
os.write(fd, b'{"left"')  # no line
"""
LEAVE = """
import os, signal, sys, time
def leave(*_):
    time.sleep(float(sys.argv[1]))
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGUSR1, leave)
from rannd.ranks import rank_notes
rank_notes.tell(step=1)
time.sleep(300)
"""


class Errand(IdleErrand):
    """Notes what it hears; `act` is called at the first note of a rank that is ready."""

    def __init__(self, act: Callable[[Errand], None] = lambda _: None) -> None:
        self.notes: list[dict[str, Any]] = []
        self.wants_to_leave = 0.0
        self._act = act
        self._at = time.monotonic()

    def due(self) -> float:
        return self._at

    def run(self, leave: Callable[[float], None]) -> None:
        self._at = time.monotonic() + 0.05
        if self.wants_to_leave:
            leave(self.wants_to_leave)

    def take_note(self, note: dict[str, Any]) -> None:
        self.notes.append(note)
        if len(self.notes) == 1:
            self._act(self)


def _ends(result: Any) -> list[int]:
    return sorted(end.status for end in result.ends)


def test_notes_are_heard_and_what_is_none_is_left_out() -> None:
    errand = Errand()
    result = run(Listener(None), 1, "-c", NOTES, errand=errand, variables=_path())
    assert _ends(result) == [0]
    assert errand.notes == [{"step": 3}, {"step": 4}]


def test_without_an_errand_a_rank_has_nobody_to_tell() -> None:
    code = "import os; from rannd.ranks import rank_notes; assert rank_notes.VARIABLE not in os.environ"
    assert _ends(run(Listener(None), 1, "-c", code, variables=_path())) == [0]


def _leave(errand: Errand) -> None:
    errand.wants_to_leave = 60.0


def test_ranks_that_are_to_leave_end_by_themselves() -> None:
    result = run(Listener(None), 1, "-c", LEAVE, "0.3", "0", errand=Errand(_leave), variables=_path())
    assert _ends(result) == [0]
    assert result.signal == 0


def test_ranks_that_do_not_leave_in_time_are_ended() -> None:
    def soon(errand: Errand) -> None:
        errand.wants_to_leave = 0.2

    result = run(Listener(None), 1, "-c", LEAVE, "300", "0", errand=Errand(soon), variables=_path())
    assert _ends(result) == [-signal.SIGTERM]
    assert [end.ordered for end in result.ends] == [True]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_from_outside_lets_ranks_leave(signum: signal.Signals) -> None:
    result = run(
        Listener(None),
        1,
        "-c",
        LEAVE,
        "0.3",
        "0",
        errand=Errand(lambda _: os.kill(os.getpid(), signum)),
        variables=_path(),
    )
    assert _ends(result) == [0]
    assert result.signal == signum


@pytest.mark.parametrize(
    ("second", "end", "told"),
    [(signal.SIGUSR1, 0, signal.SIGUSR1), (signal.SIGTERM, -signal.SIGTERM, signal.SIGTERM)],
)
def test_a_second_notice_kills_nobody(second: signal.Signals, end: int, told: signal.Signals) -> None:
    """Batch systems may repeat a notice, and send SIGTERM when its time is over."""

    def twice(_: Errand) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Timer(0.5, os.kill, (os.getpid(), second)).start()

    result = run(Listener(None), 1, "-c", LEAVE, "2", "0", errand=Errand(twice), variables=_path())
    assert _ends(result) == [end]
    assert result.signal == told


def _path() -> dict[str, str]:
    """Where ranks find rannd, also where it is not installed."""
    import rannd

    return {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(rannd.__file__)))}
