"""A home of its own for each file's jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from job import Job


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.home.close()
