"""Entries that another node's cache has: judged before rank 0's cache gets them, and discarded where they were found.

Each node of these jobs has a rank, which is a thread here, and a daemon of its own.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rannd import config
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key, make_key
from rannd.runtime.comm.cache_client import Cache
from rannd.runtime.comm.world import World

KEY = make_key("deployment", {"graph": "g", "plan.rows": 1})
NODES = 2


class Meeting:
    """Where the ranks of a job exchange values."""

    def __init__(self) -> None:
        self._all, self._values = threading.Barrier(NODES, timeout=120), cast("list[Any]", [None] * NODES)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._all.wait()
        found = list(self._values)
        self._all.wait()
        return found


class Rank:
    """As much of a World as a cache uses."""

    nodes, first_on_node, hosts = NODES, True, ("one", "two")

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._meeting = rank, meeting
        self.sent = 0
        """Bytes of values that this rank has broadcast."""

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return self._meeting.gather(self.rank, numbers)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._meeting.gather(self.rank, data)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        self.sent += len(data or b"") if self.rank == source else 0
        found: bytes = self._meeting.gather(self.rank, data)[source]
        return found


def client(home: Any) -> Client:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.variables().items():
            patch.setenv(name, value)
        return connect(mode="on", timeout_s=60, idle_s=300, max_bytes=1 << 30)


@pytest.fixture
def homes(daemon_home: Any) -> Iterator[list[Any]]:
    """Of rank 0's node and of the other's, whose daemon is ended like the first one's."""
    base = Path(tempfile.mkdtemp(prefix="rannd-test-"))  # short enough for AF_UNIX
    other = type(daemon_home)(base)
    try:
        yield [daemon_home, other]
    finally:
        other.end_daemons()
        shutil.rmtree(base)


def on_ranks(homes: list[Any], use: Callable[[Cache], None]) -> list[Rank]:
    """Uses the cache on both ranks; ends as each job does."""
    meeting = Meeting()
    ranks = [Rank(rank, meeting) for rank in range(NODES)]
    clients = [client(home) for home in homes]

    def play(rank: int) -> None:
        cache = Cache(cast("World", ranks[rank]), config.Config())
        cache.connect = lambda: clients[rank]  # type: ignore[method-assign]
        with cache.connected():
            use(cache)

    with ThreadPoolExecutor(NODES) as both:
        list(both.map(play, range(NODES)))
    return ranks


def job(homes: list[Any], right: bool) -> list[Rank]:
    """Looks the entry up on both ranks, whose check of it is this."""

    def use(cache: Cache) -> None:
        found = cache.elsewhere(KEY)
        assert found == b"value" * 1000
        if right:
            cache.accept(KEY, found)
        else:
            cache.discard(KEY, "wrong")

    return on_ranks(homes, use)


def held(home: Any, key: Key = KEY) -> bytes | None:
    with client(home) as opened:
        return opened.get(key)


@pytest.fixture(autouse=True)
def entry(homes: list[Any]) -> None:
    with client(homes[1]) as opened:
        assert opened.put(KEY, b"value" * 1000)


def test_what_is_right_is_copied_and_sent_once(homes: list[Any]) -> None:
    ranks = job(homes, right=True)
    assert held(homes[0]) == held(homes[1]) == b"value" * 1000
    assert ranks[1].sent == 5000
    assert ranks[0].sent < 1000, "the nodes that have it got it again"


def test_what_is_wrong_is_copied_nowhere_and_discarded_where_it_was(homes: list[Any]) -> None:
    job(homes, right=False)
    assert held(homes[0]) is None
    assert held(homes[1]) is None


def test_what_rank_0_discards_does_not_come_back_from_other_nodes(homes: list[Any]) -> None:
    def use(cache: Cache) -> None:
        cache.discard_on_nodes([KEY] if cache.client is not None else [], "wrong")

    on_ranks(homes, use)
    assert held(homes[1]) is None
