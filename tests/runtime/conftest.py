"""One process that is a world of its own, with a cache and configuration of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pyrannc
from rannd.runtime.comm.cache_client import Cache


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, daemon_home: object) -> Iterator[None]:
    monkeypatch.setenv("RANNC_CACHE", "off")
    monkeypatch.setenv("RANNC_LOG_LEVEL", "warn")
    yield
    pyrannc.clear()
    Cache.lost = False  # the daemon that it lost was this test's
