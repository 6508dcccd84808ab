"""The hub of the side channel among strangers on its port: ranks hear of failures all the same."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hub_thread import HubThread, frame, heard

from rannd.ranks import admission
from rannd.ranks.admission import new_token
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import Left, RankHello, Told, connect

FAILURE = Failure(1, "host", 7, "raised", "step 3", "ValueError: no")


@pytest.fixture
def hub() -> Iterator[HubThread]:
    found = HubThread(2)
    yield found
    found.stop()
    assert found.error is None


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
def test_strangers_end_no_failure_detection(hub: HubThread, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
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
    rank_1 = connect(["127.0.0.1"], hub.port, hub.token)
    assert rank_1 is not None
    rank_1.send(RankHello(1, "host", 7))
    rank_1.send(Told(FAILURE))
    assert next(heard(hub.rank_0)) == next(heard(rank_1)) == Told(FAILURE)
    rank_1.close()


def test_a_rank_of_another_job_is_not_taken_for_one_of_this(hub: HubThread) -> None:
    assert connect(["127.0.0.1"], hub.port, new_token()) is None


@pytest.mark.parametrize(
    "sent",
    [frame(b"\xc1"), frame(b"\x92\xa1\xff\x01"), frame(b"\x91" * 100_000)],
    ids=["type", "UTF-8", "deep"],
)
def test_a_rank_that_sends_nonsense_ends_its_own_connection(hub: HubThread, sent: bytes) -> None:
    hub.rank_0.send(RankHello(0, "host", 6))
    rank_1 = connect(["127.0.0.1"], hub.port, hub.token)
    assert rank_1 is not None
    rank_1.send(RankHello(1, "host", 7))
    rank_1.send(Left(1, 0))
    assert next(heard(hub.rank_0)) == next(heard(rank_1)) == Left(1, 0)
    rank_1.socket.sendall(sent)
    assert rank_1.receive() is None
    rank_1.close()
