"""The hub of failure detection among strangers, and among ranks that send what no rank sends: others are served."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import Any

import msgspec
import pytest
from fuzz.mutation import Mutator
from fuzz.strangers import LONG_S, SEED, Strangers
from fuzz.watched import Found
from hub_thread import HubThread, frame, heard

from rannd.ranks import admission
from rannd.ranks.admission import introduce
from rannd.runtime.failure import coordinator
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import (
    AnyMessage,
    Ask,
    Forgiven,
    Gone,
    Heard,
    Left,
    RankHello,
    Stacks,
    Stuck,
    Told,
    Waits,
    connect,
)

BATCHES, ROUNDS, AT_ONCE = 6, 2000, 5
GROWTH = 256 << 20
LEGITIMATE = 12
"""Rank of the one that is served meanwhile."""


def sequences(rank: int) -> list[list[AnyMessage]]:
    """What a rank sends, and what it does not."""
    hello, failure = RankHello(rank, "host", 7), Failure(rank, "host", 7, "raised", "step 3", "ValueError: no", stage=1)
    stacks = Stacks(1, "waiting", "step 3", "train.py:4", "File ..", "forward", "train.py:4", "", 3.0)
    return [
        [hello, Left(rank, 4)],
        [hello, Told(failure), Heard()],
        [hello, Told(msgspec.structs.replace(failure, certain=False))],
        [hello, Stuck(rank, 9.0), stacks],
        [hello, Stuck(rank, 9.0), msgspec.structs.replace(stacks, doing="script")],
        [hello, Waits(rank), stacks],
        [hello, Ask(1, True), Forgiven(), Gone(rank), Heard()],
    ]


def is_of_accept(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "socket.__new__"


def serve(hub: HubThread, rank: int) -> float:
    """A rank comes, is heard and hears; the seconds that it took."""
    begin = time.monotonic()
    channel = connect(["127.0.0.1"], hub.port, hub.token)
    assert channel is not None, "a rank is not admitted"
    channel.send(RankHello(rank, "host", 7))
    channel.send(Left(rank, 3))
    assert any(message == Left(rank, 3) for message in heard(channel)), "a rank is not heard"
    channel.close()
    return time.monotonic() - begin


def knock(hub: HubThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", hub.port), timeout=LONG_S)


@pytest.mark.parametrize("batches", [BATCHES, pytest.param(20 * BATCHES, marks=pytest.mark.full)])
def test_strangers(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    found, slowest = Found(), 0.0
    hub = HubThread(batches, found.watched(is_of_accept))
    frames = [frame(msgspec.msgpack.encode(message)) for messages in sequences(1) for message in messages]
    strangers = Strangers(1, lambda: knock(hub), hub.token, frames)
    try:
        for batch in range(batches):
            strangers.come(20, silent=100 if batch % 3 == 2 else 20)
            slowest = max(slowest, serve(hub, batch))
            strangers.leave()
    finally:
        hub.stop()
    assert hub.error is None
    assert found.violations == []
    assert found.grown < GROWTH
    print(f"{strangers.came} strangers at the hub of {batches} ranks; a rank waits {slowest:.1f} s at most")


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20 * ROUNDS, marks=pytest.mark.full)])
def test_ranks(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "ANSWER_S", 0.01)
    monkeypatch.setattr(coordinator, "GRACE_S", 0.01)
    mutator, chance, found, slowest, sent = Mutator(SEED + 7), random.Random(SEED), Found(), 0.0, 0
    for batch in range(rounds // AT_ONCE):
        count = 1 if batch % 2 else 2 * AT_ONCE - 1
        hub = HubThread(16, found.watched(is_of_accept))
        ends = []
        try:
            for number in range(count):
                end = knock(hub)
                ends.append(end)
                introduce(end, hub.token)
                with contextlib.suppress(ConnectionError):
                    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(sequences(number)[(number + batch) % 7]))
                    for data in _frames(mutator.mutated(plain), chance):
                        end.sendall(data)
                        sent += 1
            slowest = max(slowest, serve(hub, LEGITIMATE))
        finally:
            hub.stop()
            for end in ends:
                end.close()
        assert hub.error is None, hub.error
    assert found.violations == []
    assert sent > rounds
    assert found.grown < GROWTH
    print(f"{rounds} ranks that send {sent} mutated messages to their hub; others wait {slowest:.1f} s at most")


def _frames(messages: Any, chance: random.Random) -> list[bytes]:
    """What is sent for changed messages: some frames are cut off, or say that they are longer."""
    found = []
    for message in messages if isinstance(messages, list) else [messages]:
        try:
            data = frame(msgspec.msgpack.encode(message))
        except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
            continue
        if chance.random() < 0.05:
            torn = [data[:-1], data[4:], data + b"\0", chance.randbytes(4) + data[4:], b"\xff\xff\xff\xff"]
            data = chance.choice(torn)
        found.append(data)
    return found
