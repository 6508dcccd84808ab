"""Connects a job to the daemons' caches: rank 0 uses the daemon of its node for traces, profiles and deployments.

In a multi-node job the first rank of each other node is its *keeper*. It stores in its node's cache what rank 0 has
read or written, and looks up what rank 0's cache lacks. So a later job finds these entries on whichever node its rank 0
runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import msgspec

from rannd import log
from rannd.config import Config
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key
from rannd.ranks.host_name import encodable
from rannd.runtime.comm.world import World

GIB = 1024**3

T = TypeVar("T")

_LISTED = msgspec.msgpack.Decoder(list[tuple[Key, bool]])
_KEYS = msgspec.msgpack.Decoder(list[Key])
_NUMBERS = msgspec.msgpack.Decoder(list[int])
_VALUES = msgspec.msgpack.Decoder(list[bytes])


def holder() -> str:
    """Name of this job's rank 0, shown to other jobs that wait for an entry it is creating."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"rank 0 of job {encodable(job)}" if job else f"rank 0 of another job (process {os.getpid()})"


_CALLED = {"learned": "knowledge of stages' times", "runtime": "knowledge of the runtime's times"}
"""What entries are called whose kind is no noun."""


def understood(
    client: Client,
    key: Key,
    data: bytes | None,
    decoder: msgspec.msgpack.Decoder[T],
    plausible: Callable[[T], bool] | None = None,
) -> T | None:
    """Decode a cached value; None if there is none, or if it cannot be used: then it is discarded with a warning.

    `plausible`: whether a decoded value can be one.
    """
    if data is None:
        return None
    try:
        found = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        wrong = str(exc)
    else:
        if plausible is None or plausible(found):
            return found
        wrong = f"it has values that cannot be: {str(found)[:200]}"
    client.discard(key, wrong)
    what = _CALLED.get(key.kind, key.kind)
    log.get("RaNNCModule").warning("The cached %s cannot be used: %s. It is made anew", what, wrong)
    return None


def tell_miss(client: Client, key: Key) -> None:
    """Log why `key` is not in the cache: the difference from a similar entry, and at debug level the full reason."""
    changed, whole = client.why(key)
    logger = log.get("RaNNCModule")
    if changed:
        # Only of plans, as a job often has several traces, for training and for evaluation.
        level = logging.INFO if key.kind == "deployment" else logging.DEBUG
        logger.log(level, "No cached %s fits: %s (rannc-cache why --last)", key.kind, changed)
    if whole:
        logger.debug("No cached %s fits: %s", key.kind, whole)


class Cache:
    """Connections of a job to its nodes' daemons, open while a graph is prepared."""

    lost: ClassVar[bool] = False
    """Whether this process has lost its connection to the daemon and logged that; it does not try again."""

    def __init__(self, world: World, config: Config) -> None:
        self._world = world
        self._config = config
        self.client: Client | None = None
        """Connection of rank 0 while connected, None otherwise."""
        self._keeper: Client | None = None
        """Connection of the first rank of each other node while connected, None otherwise."""
        self._lent: set[Key] = set()
        """Keys that `elsewhere` has found: on rank 0 until `accept`, and on the rank whose node's cache had them."""

    @property
    def off(self) -> bool:
        """Whether caching is disabled (cache=off)."""
        return self._config.cache == "off"

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Context manager that opens the connections. Collective at its end, unless the block raises."""
        first = self._world.rank == 0
        if self.client is not None or self._keeper is not None or not (first or self._world.first_on_node):
            yield
            self._share()
            return
        with self.connect() as client:
            if first:
                self.client = client
                client.used = {} if self._world.nodes > 1 else None
            else:
                self._keeper = client
            try:
                yield
                self._share()
            finally:
                self.client = self._keeper = None
                if not client.connected:
                    Cache.lost = True  # already logged; later graphs must not wait for a timeout again

    def connect(self) -> Client:
        """Open a separate connection, on any rank. After the daemon was lost, returns a client that caches nothing."""
        return connect(
            mode="off" if self.lost else self._config.cache,  # type: ignore[arg-type]
            timeout_s=self._config.daemon_timeout_s,
            idle_s=self._config.daemon_idle_s,
            max_bytes=int(self._config.cache_max_gb * GIB),
        )

    def elsewhere(self, key: Key) -> bytes:
        """Look up an entry in the other nodes' caches. Collective.

        Returns the value on all ranks, b"" if no node has it. The caller checks it, and calls `accept` or `discard`.
        """
        if self._world.nodes == 1 or self.off:
            return b""
        found = (self._keeper.get(key) if self._keeper is not None else None) or b""
        told = self._world.gather_numbers([int(bool(found))])
        source = next((rank for rank, (has,) in enumerate(told) if has), None)
        if source is None:
            return b""
        if self._world.rank == 0:
            log.get("RaNNCModule").debug("%s has %s %s in its cache", self._world.hosts[source], key.kind, key.short)
        found = self._world.broadcast_bytes(found, source)
        if self._world.rank in (0, source):
            self._lent.add(key)
        return found

    def accept(self, key: Key, found: bytes) -> None:
        """Copy a value, now that it is known to be right, to rank 0's cache if it is from `elsewhere`."""
        if self.client is not None and key in self._lent:
            self._lent.remove(key)
            self.client.put(key, found)
            if self.client.used is not None:
                self.client.used[key] = (found, False)  # not made here: the nodes that have one keep it

    def discard(self, key: Key, reason: str) -> None:
        """Discard a value that turned out to be wrong: in rank 0's cache, and where `elsewhere` took it."""
        client = self.client or (self._keeper if key in self._lent else None)
        self._lent.discard(key)
        if client is not None:
            client.discard(key, reason)

    def discard_on_nodes(self, keys: Sequence[Key], reason: str) -> None:
        """Discard what rank 0 has discarded in the other nodes' caches, too, from where it would come back. Collective.

        `keys`: rank 0's count.
        """
        if self._world.nodes == 1 or self.off:
            return
        for key in _KEYS.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(list(keys)))):
            if self._keeper is not None:
                self._keeper.discard(key, reason)

    def _share(self) -> None:
        """Copy entries to the other nodes' caches: those that rank 0 has read and they lack, and those it has written.

        Collective.
        """
        if self._world.nodes == 1 or self.off:
            return
        used = self.client.used if self.client is not None and self.client.used is not None else {}
        told = [(key, made) for key, (_, made) in used.items()]
        told = _LISTED.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(told)))
        if not told:
            return
        wanted: list[int] = []
        if self._keeper is not None and self._keeper.connected:
            values = self._keeper.get_many([key for key, _ in told])
            # This node's own profile may contain more measurements than rank 0's, so it is not replaced.
            wanted = [
                number
                for number, ((key, made), value) in enumerate(zip(told, values, strict=True))
                if value is None or (made and key.kind != "profile")
            ]
        everyones = [_NUMBERS.decode(each) for each in self._world.gather_bytes(msgspec.msgpack.encode(wanted))]
        asked = sorted({number for each in everyones for number in each})
        if not asked:
            return
        values = [used[told[number][0]][0] for number in asked] if self._world.rank == 0 else []
        given = _VALUES.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(values)))
        if self._keeper is not None:
            mine = [(told[number][0], value) for number, value in zip(asked, given, strict=True) if number in wanted]
            self._keeper.put_many(mine)
        if self.client is not None and self.client.used is not None:
            self.client.used = {}
