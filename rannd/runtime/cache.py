"""The way to the cache: rank 0 talks to the daemon of its node, which keeps traces, profiles and deployments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rannd.config import Config
from rannd.daemon.client import Client, connect
from rannd.runtime.world import World

GIB = 1024**3


def holder() -> str:
    """What other jobs call rank 0 of this one while they wait for what it makes."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"rank 0 of job {job}" if job else f"rank 0 of another job (process {os.getpid()})"


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

    def connect(self) -> Client:
        """A connection of its own, on any rank."""
        return connect(
            mode=self._config.cache,  # type: ignore[arg-type]
            timeout_s=self._config.daemon_timeout_s,
            idle_s=self._config.daemon_idle_s,
            max_bytes=int(self._config.cache_max_gb * GIB),
        )
