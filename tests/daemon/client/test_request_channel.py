"""A session keeps its connection, and notices when that has become useless."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def put(session: DaemonSession, number: int) -> None:
    entry = protocol.NewEntry(key(number).digest, "trace", key(number).components, b"%d" % number)
    assert session.ask(protocol.Put("1", [entry]), protocol.Done).count == 1


def got(session: DaemonSession, number: int) -> bytes | None:
    (value,) = session.ask(protocol.Get([key(number).digest]), protocol.Values).values
    return value


@pytest.fixture
def session(daemon_home) -> Iterator[DaemonSession]:
    made = DaemonSession(places(), Settings(600, 1 << 30, version()), 60)
    made.greet()
    yield made
    made.close()


def connections(wanted: int) -> int:
    """Connections to the daemon; libzmq closes one a moment after its peer, so wait for the number `wanted`."""
    deadline = time.monotonic() + 30
    while True:
        sockets = Path("/proc/net/unix").read_text().splitlines()
        found = sum(line.endswith(" " + places().socket) for line in sockets) - 1  # the one that listens
        if found == wanted or time.monotonic() > deadline:
            return found
        select.select([], [], [], 0.01)


def test_one_connection_serves_all_requests_and_ends_with_the_session(session: DaemonSession) -> None:
    assert connections(0) == 0
    for number in range(50):
        put(session, number)
        assert connections(1) == 1
    session.close()
    assert connections(0) == 0
    assert got(session, 7) == b"7", "and it can be used again"


def test_a_session_that_nobody_closes_hangs_up_when_it_is_forgotten(session: DaemonSession) -> None:
    put(session, 1)
    other = DaemonSession(session.places, session.settings, 60)
    put(other, 2)
    assert connections(2) == 2
    del other
    assert connections(1) == 1


def test_the_next_daemon_is_asked_after_a_kill(daemon_home, session: DaemonSession) -> None:
    for number in range(5):
        put(session, number)
        (pid,) = daemon_home.pids()
        os.kill(pid, signal.SIGKILL)
        assert [got(session, each) for each in range(number + 1)] == [b"%d" % each for each in range(number + 1)]
        assert daemon_home.pids() != [pid]


def test_a_late_answer_is_not_taken_for_the_next(daemon_home, session: DaemonSession) -> None:
    for number in range(3):
        put(session, number)
    (pid,) = daemon_home.pids()
    session.timeout_s = 0.3
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DaemonError, match="did not answer in time"):
        got(session, 0)
    os.kill(pid, signal.SIGCONT)
    session.timeout_s = 60
    assert [got(session, number) for number in (1, 2, 0)] == [b"1", b"2", b"0"]


def test_a_forked_process_gets_a_connection_of_its_own(session: DaemonSession) -> None:
    put(session, 1)
    put(session, 2)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if all(got(session, 2) == b"2" for _ in range(20)) else 1)
        finally:
            os._exit(2)
    assert all(got(session, 1) == b"1" for _ in range(20))
    assert os.waitpid(child, 0)[1] == 0
    assert got(session, 1) == b"1"


def test_threads_share_a_session(session: DaemonSession) -> None:
    for number in range(8):
        put(session, number)

    def work(number: int) -> bool:
        return all(got(session, number) == b"%d" % number for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
