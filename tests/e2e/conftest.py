"""A home of its own for each file's jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job import Job


@pytest.fixture(scope="module")
def job(forks: Path) -> Iterator[Job]:
    made = Job(forks)
    yield made
    made.home.close()
