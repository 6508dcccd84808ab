"""The way to the cache: rank 0 talks to the daemon of its node, which keeps traces, profiles and deployments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from rannd import log
from rannd.config import Config
from rannd.daemon.client import Client, connect
from rannd.daemon.keys import Key
from rannd.runtime.world import World

GIB = 1024**3

T = TypeVar("T")


def holder() -> str:
    """What other jobs call rank 0 of this one while they wait for what it makes."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"rank 0 of job {job}" if job else f"rank 0 of another job (process {os.getpid()})"


def understood(client: Client, key: Key, data: bytes | None, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """What a value of the cache says; None where there is none, or it says nothing: then it is set aside, as missed."""
    if data is None:
        return None
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError, MemoryError) as exc:
        client.discard(key, str(exc))
        log.get("RaNNCModule").warning("The cached %s cannot be used: %s", key.kind, exc)
        return None


class Cache:
    """One connection to this node's daemon, as configured, for as long as a graph is prepared."""

    def __init__(self, world: World, config: Config) -> None:
        self._world = world
        self._config = config
        self.client: Client | None = None
        """On rank 0 while connected, None otherwise."""

    @property
    def off(self) -> bool:
        """Nothing is kept or found."""
        return self._config.cache == "off"

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Keep the connection open, on rank 0."""
        if self._world.rank != 0 or self.client is not None:
            yield
            return
        with self.connect() as client:
            self.client = client
            try:
                yield
            finally:
                self.client = None
                if not client.connected:
                    self._world.uncached = True  # it was told once, and no other graph waits for it

    def connect(self) -> Client:
        """A connection of its own, on any rank. Where the daemon was lost, it is as if there never was one."""
        return connect(
            mode="off" if self._world.uncached else self._config.cache,  # type: ignore[arg-type]
            timeout_s=self._config.daemon_timeout_s,
            idle_s=self._config.daemon_idle_s,
            max_bytes=int(self._config.cache_max_gb * GIB),
        )
