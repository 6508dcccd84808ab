"""Notices that hosts go away: what is heard, what is not, and that nobody who connects makes the listener wait."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from idle_errand import IdleErrand
from monitored import run

import rannd
from rannd.runner.watch import notice_socket, wire
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.notice_socket import Notice, Noticed, NoticeSocket, ask, decode_notice, listeners

LONG_S = 60.0
SOUND = wire.encode_json(wire.NOTICE, host="c", seconds=5)


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that no job of this machine has."""
    monkeypatch.setattr(notice_socket, "PREFIX", f"test-notices-{os.getpid()}")


@pytest.fixture
def heard() -> Iterator[NoticeSocket]:
    made = NoticeSocket()
    yield made
    made.close()


def _next(heard: NoticeSocket) -> list[Notice]:
    """The notices that come next."""
    until = time.monotonic() + LONG_S
    while not (found := heard.hear()):
        assert time.monotonic() < until
        select.select(heard.descriptors(), [], [], 0.1)
    return found


def _connected(heard: NoticeSocket, said: bytes = b"") -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(LONG_S)
    channel.connect("\0" + heard.name)
    channel.sendall(said)
    return channel


def _closed(heard: NoticeSocket, channel: socket.socket) -> bool:
    """Whether the listener ends a connection without a word."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        assert heard.hear() == []
        if select.select([channel], [], [], 0.01)[0]:
            try:
                return channel.recv(100) == b""
            except ConnectionResetError:  # with unread bytes
                return True
    return False


def test_a_notice_and_its_answer(heard: NoticeSocket) -> None:
    assert listeners() == [heard.name]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, heard.name, Notice("c", 30.0), LONG_S)
        assert _next(heard) == [Notice("c", 30.0)]
        second = pool.submit(ask, heard.name, Notice("", 0.5), LONG_S)
        assert _next(heard) == [Notice("", 0.5)]
        heard.answer(Noticed(True, "the ranks save"))
        heard.answer(Noticed(False, "no such host"))
        heard.answer(Noticed(True, "nobody has asked this"))
        assert first.result() == Noticed(True, "the ranks save")
        assert second.result() == Noticed(False, "no such host")


def test_a_socket_that_is_closed_is_not_found() -> None:
    made = NoticeSocket()
    made.close()
    assert made.name not in listeners()
    with pytest.raises(ConnectionRefusedError):
        ask(made.name, Notice("c", 1.0), LONG_S)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.encode_json(wire.STOP, signal=9),
        wire.encode(wire.NOTICE, b"[1]"),
        wire.encode(wire.NOTICE, b"\xff"),
        wire.NOTICE + b"\x7f\xff\xff\xff",
        wire.encode(wire.NOTICE, b" " * 4200),
        wire.NOTICE + (5000).to_bytes(4, "big") + b" " * 4500,
    ],
)
def test_what_is_no_notice_ends_its_own_connection(heard: NoticeSocket, said: bytes) -> None:
    with _connected(heard, said) as channel, _connected(heard, SOUND):
        assert _next(heard) == [Notice("c", 5.0)]
        assert _closed(heard, channel)


def test_a_notice_may_come_in_pieces_and_its_guest_may_go(heard: NoticeSocket) -> None:
    with _connected(heard, SOUND[:7]) as channel:
        assert heard.hear() == []
        channel.sendall(SOUND[7:])
        assert _next(heard) == [Notice("c", 5.0)]
    heard.answer(Noticed(True, "nobody hears this"))
    with _connected(heard, SOUND):
        assert _next(heard) == [Notice("c", 5.0)], "the next one is served"


def test_who_says_nothing_keeps_nobody_waiting(heard: NoticeSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_socket, "PATIENCE_S", 0.2)
    silent = [_connected(heard) for _ in range(notice_socket.MOST_GUESTS)]
    begin = time.monotonic()
    assert heard.hear() == []
    assert time.monotonic() - begin < LONG_S
    assert heard.descriptors(), "their ends are awaited"
    with _connected(heard, SOUND):
        assert _next(heard) == [Notice("c", 5.0)], "after the patience with the others is over"
    for channel in silent:
        assert channel.recv(1) == b""
        channel.close()


def test_who_cannot_be_accepted_waits(heard: NoticeSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_socket, "PAUSE_S", 0.2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _connected(heard, SOUND) as channel:
        resource.setrlimit(resource.RLIMIT_NOFILE, (channel.fileno() + 1, limits[1]))
        try:
            assert heard.hear() == []
            assert heard.descriptors() == [], "it would be readable all the time"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert _next(heard) == [Notice("c", 5.0)]


def test_another_user_is_sent_away(heard: NoticeSocket) -> None:
    found: list[Notice] = []

    def knock() -> bool:
        with _connected(heard) as channel:
            return channel.recv(1) == b""

    _as_another_user(knock, lambda: found.extend(heard.hear()))
    assert found == []


def test_what_listens_for_another_user_is_told_nothing() -> None:
    """Somebody may take a name that looks like one of ours."""
    read, write = os.pipe()
    name = f"{notice_socket.own_prefix()}1-0"

    def listen() -> bool:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()
            os.write(write, b"x")
            channel, _ = listener.accept()
            with channel:
                return channel.recv(1) == b""

    def try_it() -> None:
        if name in listeners() and select.select([read], [], [], 0)[0]:
            os.read(read, 1)
            assert ask(name, Notice("c", 1.0), LONG_S) is None

    _as_another_user(listen, try_it)
    os.close(read)
    os.close(write)


def _as_another_user(what: Callable[[], bool], meanwhile: Callable[[], object]) -> None:
    """Run something as another user, who has to find it true."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setuid(65534)
            code = 0 if what() else 1
        finally:
            os._exit(code)
    until = time.monotonic() + LONG_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < until
        meanwhile()
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"host": "c"},
        {"host": 3, "seconds": 1},
        {"host": "a" * 256, "seconds": 1},
        {"host": "a\nb", "seconds": 1},
        {"host": "\udc80", "seconds": 1},
        {"host": "c", "seconds": "1"},
        {"host": "c", "seconds": True},
        {"host": "c", "seconds": -1},
        {"host": "c", "seconds": float("nan")},
        {"host": "c", "seconds": float("inf")},
        {"host": "c", "seconds": 10**400},
    ],
)
def test_fields_that_no_notice_has(fields: dict[str, object]) -> None:
    (frame,) = wire.FrameReader().feed(wire.encode_json(wire.NOTICE, **fields))
    with pytest.raises(wire.WireError):
        decode_notice(frame[1])


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
from rannd.ranks import rank_notes
rank_notes.tell(step=os.getppid())
time.sleep(300)
"""


class Errand(IdleErrand):
    """Gives a notice where the rank's watcher hears it, and lets the rank leave when it has an answer."""

    leave_s = LONG_S

    def __init__(self) -> None:
        self.given: list[tuple[Notice, int]] = []
        self.answers: list[Noticed | None] = []
        self.thread: threading.Thread | None = None
        self._at = time.monotonic()

    def due(self) -> float:
        return self._at

    def run(self, leave: Callable[[float], None]) -> None:
        self._at = time.monotonic() + 0.05
        if self.thread is not None and not self.thread.is_alive():
            leave(LONG_S)

    def take_note(self, note: dict[str, Any]) -> None:
        self.thread = threading.Thread(target=self._tell, args=(note["step"],))
        self.thread.start()

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        self.given.append((notice, rank))
        return Noticed(True, "heard")

    def _tell(self, watcher: int) -> None:
        names = [name for name in listeners() if name.startswith(f"{notice_socket.own_prefix()}{watcher}-")]
        self.answers += [ask(name, Notice("", 7.0), LONG_S) for name in names]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_watcher_on_another_machine_asks_the_monitor(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Connections to 127.0.0.2 have another address at each end, as between two machines."""
    monkeypatch.undo()  # the watcher is a process of its own
    listener = Listener("127.0.0.1")
    listener.socket.close()
    listener.socket = socket.create_server((address, 0))
    listener.address = ["tcp", *listener.socket.getsockname()]
    errand = Errand()
    root = str(Path(rannd.__file__).parents[1])
    variables = {"PYTHONPATH": root, "SLURM_STEP_NUM_TASKS": "1"}
    result = run(listener, 1, "-c", WAITS, errand=errand, variables=variables)
    assert [end.status for end in result.ends] == [0]
    apart = address == "127.0.0.2"
    assert errand.answers == [Noticed(True, "heard")] * apart
    assert errand.given == [(Notice("", 7.0), 0)] * apart
