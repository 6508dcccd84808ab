"""Jobs that learn from their steps, and their caches, looked into and changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from job import Job

from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key

LEARNING = {
    "RANNC_PARTITION_NUM": "2",
    "RANNC_PIPELINE_NUM": "2",
    "RANNC_CALIBRATE_AFTER": "8",
    "RANNC_CACHE": "on",
    "OMP_NUM_THREADS": "1",
}
"""Variables of a job of two stages that learns after eight steps."""


def in_cache(job: Job, monkeypatch: pytest.MonkeyPatch, use: Callable[[Client], None]) -> None:
    """Use the cache of a job's home."""
    for name, value in job.environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    with connect(mode="on", timeout_s=30, idle_s=60, max_bytes=1 << 30) as client:
        use(client)


def keys_of(job: Job, kind: str) -> list[Key]:
    """Return the keys of a kind."""
    listed = json.loads(job.run("rannc-cache", "ls", "--json"))
    return [Key(kind, each["key"], each["components"]) for each in listed if each["kind"] == kind]
