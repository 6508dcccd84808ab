"""One private home for all jobs of a test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from parity.cases import SEED
from parity.launch import Home, Outcome


def pytest_report_header() -> str:
    return f"parity cases drawn with TEST_SEED={SEED}"


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Outcome]:
    """What became of the cases that ran so far."""
    return {}


@pytest.fixture(scope="session")
def home(forks: Path) -> Iterator[Home]:
    """Directories of the jobs; their daemon and everything else that still runs there ends with the session."""
    made = Home(forks)
    yield made
    made.close()
    assert made.strays() == []
