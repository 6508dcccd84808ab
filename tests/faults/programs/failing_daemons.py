"""Each call of the daemon and of its client fails in turn: no value is wrong, none that was acknowledged is lost.

Arguments: the part of `PARTS`; how many calls of each kind fail, with one error each, or ``all`` with all errors; a
file with which the daemon's calls are let fail.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults.faulty import ALL_CALLS, Faults, FaultsElsewhere, failures, words

from rannd.daemon.client import spawn
from rannd.daemon.client.cache import Lease, connect
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common import keys
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.server import boot
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError

part, most, control = sys.argv[1], None if sys.argv[2] == "all" else int(sys.argv[2]), Path(sys.argv[3])
LIMIT, SIZE = 200_000, 20_000
"""The cache holds ten values: each further one evicts another."""
SURE = 5
"""Number of the latest values that are not evicted."""
START_S, ANSWER_S, LONG_S = 2.0, 0.5, 60.0
"""Seconds that a client waits: for a start and an answer where something fails, and where nothing does."""

os.environ["FAULTS_CONTROL"] = str(control)
spawn.KEPT |= {"LD_PRELOAD", "FAULTS_UNDER", "FAULTS_CONTROL"}  # the daemon gets the library, too
here, in_daemon = Faults(), FaultsElsewhere(control)
acknowledged: list[int] = []
numbers = itertools.count()


class Told(logging.Handler):
    """Keeps what a client says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


told = Told()
logging.getLogger("rannd.Daemon").addHandler(told)
logging.getLogger("rannd.Daemon").propagate = False


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def value(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def work(timeout_s: float) -> None:
    """A client that stores a value under a lease, and reads it and the one before."""
    with connect(mode="on", timeout_s=timeout_s, idle_s=600, max_bytes=LIMIT) as client:
        number = next(numbers)
        lease = client.lease(key(number), 0)
        assert isinstance(lease, Lease) or told.lines, "no lease, and nothing is told"
        if client.put(key(number), value(number)):
            acknowledged.append(number)
        else:
            assert told.lines, "not stored, and nothing is told"
        if isinstance(lease, Lease):
            lease.release()
        for each in acknowledged[-2:]:
            found = client.get(key(each))
            assert found in (None, value(each)), "a wrong value"
            assert found is not None or told.lines, "a miss, and nothing is told"


def session() -> DaemonSession:
    return DaemonSession(places(), Settings(600, LIMIT, version()), LONG_S)


def check() -> int:
    """The next client finds a store that is whole; the pid of its daemon."""
    told.lines.clear()
    with connect(mode="on", timeout_s=LONG_S, idle_s=600, max_bytes=LIMIT) as client:
        assert client.connected, told.lines
        sure = acknowledged[-SURE:]
        assert client.get_many([key(each) for each in sure]) == [value(each) for each in sure], "acknowledged, and lost"
    found = session()
    pid = found.greet().pid
    sound, corrupt = found.verify()
    found.close()
    assert (corrupt, told.lines) == ([], [])
    assert sound >= min(len(acknowledged), SURE)
    return pid


def stop() -> None:
    """End the daemon."""
    try:
        spawn.stop(places(), "a test", time.monotonic() + START_S)
    except DaemonError as exc:
        told.lines.append(str(exc))


def start() -> None:
    session().greet()


def fail_in_turn(
    faults: Faults | FaultsElsewhere,
    attempt: Callable[[], None],
    *,
    before: Callable[[], None] = lambda: None,
    counted: Callable[[], None] | None = None,
) -> None:
    """Let each call fail that there is in `counted`, by default the `attempt`; `before` comes before each attempt."""
    for _ in range(2):  # what there was before is written to its place at the first end of a daemon
        before()
        faults.plan()
        (counted or attempt)()
    counts = {call: count for call in ALL_CALLS if (count := faults.seen(call))}
    tried, reached, slowest = 0, 0, 0.0
    outcomes = dict.fromkeys(("without effect", "told", "ended the daemon"), 0)
    check()
    for call, number, error in failures(counts, most):
        where = words(call, number, error)
        before()
        pid, log = running(), Path(places().log)
        said = log.stat().st_size
        told.lines.clear()
        faults.plan(call, number, error)
        begin = time.monotonic()
        try:
            attempt()
            slowest = max(slowest, time.monotonic() - begin)
            reached += faults.seen(call) >= number
            faults.plan()
            lines = list(told.lines)
            ended = check() != pid and pid != 0 and attempt is not stop
            text = log.read_bytes()[said:].decode().splitlines()
            assert not ended or [line for line in text if "listens at" not in line], "it has ended without a word"
            assert slowest < LONG_S
        except BaseException as exc:
            exc.add_note(f"{where}; told: {told.lines}; the daemon's log: {log.read_bytes()[said:].decode()}")
            raise
        outcomes["ended the daemon" if ended else "told" if lines else "without effect"] += 1
        tried += 1
    assert reached > tried / 2, f"of {tried} calls only {reached} have failed"
    shown = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    print(f"{part}: {tried} failing calls, {shown}; slowest {slowest:.1f} s; {counts}")


def running() -> int:
    """The pid of the daemon; 0: none runs."""
    return int(Path(places().life).read_text()) if boot.lives(places()) else 0


PARTS: dict[str, Callable[[], None]] = {
    "a daemon starts": lambda: fail_in_turn(in_daemon, lambda: work(START_S), before=stop, counted=start),
    "a daemon answers": lambda: fail_in_turn(in_daemon, lambda: work(ANSWER_S)),
    "a daemon ends": lambda: fail_in_turn(in_daemon, stop, before=lambda: work(LONG_S)),
    "a client asks": lambda: fail_in_turn(here, lambda: work(ANSWER_S)),
    "a client starts the daemon": lambda: fail_in_turn(here, lambda: work(START_S), before=stop, counted=start),
}
for _ in range(LIMIT // SIZE):
    work(LONG_S)
PARTS[part]()
stop()
