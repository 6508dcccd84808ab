"""The hub of the side channel among strangers on its port: ranks hear of failures all the same."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from rannd import admission
from rannd.admission import new_token
from rannd.runtime.failure.coordinator import Hub
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import Channel, Left, RankHello, Told, connect, listen

FAILURE = Failure(1, "host", 7, "raised", "step 3", "ValueError: no")
TOKEN = new_token()


class Running:
    """A hub for two ranks in a thread of its own, as rank 0's watcher thread runs it."""

    def __init__(self) -> None:
        listener = listen(alone=True)
        self.port: int = listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._hub = Hub(2, TOKEN, listener, self._selector)
        mine, its = socket.socketpair()
        self._hub.adopt(Channel(its))
        self._stop, stopped = socket.socketpair()
        self._ends = [mine, stopped]
        self._selector.register(stopped, selectors.EVENT_READ, self._end)
        self.rank_0 = Channel(mine)
        self._ending = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _end(self) -> None:
        self._ending = True

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, _ in self._selector.select(self._hub.due()):
                    key.data()
                self._hub.tick()
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        self._stop.sendall(b"x")
        self._thread.join()
        self._hub.forget()
        self._selector.close()
        for each in (self._stop, *self._ends):
            each.close()


@pytest.fixture
def hub() -> Iterator[Running]:
    found = Running()
    yield found
    found.stop()
    assert found.error is None


def heard(channel: Channel) -> object:
    """The next message."""
    channel.socket.settimeout(30)
    messages = channel.receive()
    assert messages, "nothing came"
    return messages[0]


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


HELLO = msgspec.msgpack.encode(("RankHello", "x" * 30, 1, "h", 1))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        frame(b"\x95\xa9RankHello\xa2\xff\xff"),
        frame(HELLO),
        frame(b"\x92\xa4Told" + b"\x91" * 100_000),
        struct.pack(">I", 1 << 30),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["nothing", "18 bytes", "no token", "deep nesting", "a long frame", "HTTP"],
)
def test_strangers_end_no_failure_detection(hub: Running, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    stranger = socket.create_connection(("127.0.0.1", hub.port), timeout=30)
    stranger.sendall(sent)
    try:
        while stranger.recv(100):
            pass
    except ConnectionResetError:
        pass  # it was closed with bytes that nobody has read
    stranger.close()
    hub.rank_0.send(RankHello(0, "host", 6))
    rank_1 = connect(["127.0.0.1"], hub.port, TOKEN)
    assert rank_1 is not None
    rank_1.send(RankHello(1, "host", 7))
    rank_1.send(Told(FAILURE))
    assert heard(hub.rank_0) == heard(rank_1) == Told(FAILURE)
    rank_1.close()


def test_a_rank_of_another_job_is_not_taken_for_one_of_this(hub: Running) -> None:
    assert connect(["127.0.0.1"], hub.port, new_token()) is None


@pytest.mark.parametrize(
    "sent",
    [frame(b"\xc1"), frame(b"\x92\xa1\xff\x01"), frame(b"\x91" * 100_000)],
    ids=["type", "UTF-8", "deep"],
)
def test_a_rank_that_sends_nonsense_ends_its_own_connection(hub: Running, sent: bytes) -> None:
    hub.rank_0.send(RankHello(0, "host", 6))
    rank_1 = connect(["127.0.0.1"], hub.port, TOKEN)
    assert rank_1 is not None
    rank_1.send(RankHello(1, "host", 7))
    rank_1.send(Left(1, 0))
    assert heard(hub.rank_0) == heard(rank_1) == Left(1, 0)
    rank_1.socket.sendall(sent)
    assert rank_1.receive() is None
    rank_1.close()
