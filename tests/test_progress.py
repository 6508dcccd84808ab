"""Progress of long work: lines where nobody watches, a bar on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from rannd import log
from rannd.log import phases, progress

SCRIPT = """
from rannd import log
from rannd.log import progress
log.setup(level="info")
progress.EVERY_S = 0.0
with progress.Progress("GraphProfiler", "Measured {done} of {total} blocks", 3) as work:
    for _ in range(3):
        work.step()
"""


def test_elsewhere_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    caplog.set_level("INFO", logger="rannd")
    with log.Progress("GraphProfiler", "Measured {done} of {total} blocks", 9) as work:
        for _ in range(9):
            now += 4.0
            work.step()
    assert caplog.messages == [f"Measured {done} of 9 blocks" for done in (3, 6, 9)]


def test_others_do_not_tell(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    caplog.set_level("INFO", logger="rannd")
    for total, shown in ((5, False), (1, True)):
        with log.Progress("GraphProfiler", "{done} of {total}", total, shown=shown) as work:
            work.step()
    assert caplog.messages == []


def test_a_phase_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rannd")
    with log.long_phase("RaNNCModule", "Planning"):
        pass
    monkeypatch.setattr(phases, "EVERY_S", 0.01)
    with log.long_phase("RaNNCModule", "Planning", shown=False):
        time.sleep(0.1)
    assert caplog.messages == []
    with log.long_phase("RaNNCModule", "Tracing the model"):
        while len(caplog.messages) < 3:
            time.sleep(0.01)
    assert set(caplog.messages) == {"Tracing the model, for 0 s so far"}


def test_a_phase_has_no_thread_where_another_one_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rannd")
    monkeypatch.setattr(log.PHASES, "ticked", True)
    monkeypatch.setattr(phases, "EVERY_S", 0.01)
    threads = threading.active_count()
    with log.long_phase("RaNNCModule", "Tracing the model"):
        assert threading.active_count() == threads
        log.PHASES.tick()
        time.sleep(0.02)
        log.PHASES.tick()
        log.PHASES.tick()
    log.PHASES.tick()
    assert caplog.messages == ["Tracing the model, for 0 s so far"]


def test_on_a_terminal_a_bar() -> None:
    mine, its = pty.openpty()
    done = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"})
    os.close(its)
    seen = b""
    while True:
        try:
            data = os.read(mine, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    assert done.wait() == 0
    os.close(mine)
    assert b"Measured 3 of 3 blocks" in seen
    assert b"\x1b[" in seen, "a bar, and not lines of the log"
    assert b"[info]" not in seen
