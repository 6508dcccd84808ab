"""Several nodes, as namespaces: see network.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import Network, reason_for_none


@pytest.fixture
def network(forks: Path) -> Iterator[Callable[..., Network]]:
    """Makes a network; it ends with the test."""
    reason = reason_for_none()
    if reason:
        assert not os.environ.get("CI"), f"machines of CI can make network namespaces: {reason}"
        pytest.skip(f"no network namespaces here: {reason}")
    made: list[Network] = []

    def make(count: int, *, own_on_loopback: bool = False) -> Network:
        made.append(Network(count, forks, own_on_loopback=own_on_loopback))
        return made[-1]

    yield make
    for each in made:
        each.end()
