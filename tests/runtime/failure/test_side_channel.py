"""A channel's frames arrive whole, or it ends: no two threads in one frame, nothing after a part of one."""

from __future__ import annotations

import socket
import threading

import pytest

from rannd.runtime.failure import side_channel
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import AnyMessage, Channel, Left, Told


def narrow() -> tuple[Channel, Channel]:
    """Both ends of a channel with small buffers, so that a long frame is sent in many parts."""
    mine, its = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    its.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    return Channel(mine), Channel(its)


def long(rank: int) -> Told:
    return Told(Failure(rank, "host", 7, "raised", "step 3", str(rank) * 300_000))


def test_what_two_threads_send_arrives_whole() -> None:
    mine, its = narrow()
    threads = [threading.Thread(target=mine.send, args=(long(rank),)) for rank in range(4)]
    for thread in threads:
        thread.start()
    found: list[AnyMessage] = []
    while len(found) < 4:
        messages = its.receive()
        assert messages is not None
        found += messages
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [long(rank) for rank in range(4)]
    mine.close()
    its.close()


def test_nothing_follows_a_part_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "CONNECT_S", 0.2)
    mine, its = narrow()
    mine.send(long(1))  # nobody reads
    mine.send(Left(1, 0))
    its.socket.settimeout(30)
    data = b""
    while part := its.socket.recv(1 << 16):
        data += part
    assert b"Left" not in data
    mine.close()
    its.close()
