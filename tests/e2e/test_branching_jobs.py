"""Branches on what is in the mini-batches, on two ranks."""

from __future__ import annotations

import pytest
from job import Job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("cache", ["on", "off"])
def test_ranks_decide_alike_or_are_told(job: Job, cache: str) -> None:
    for _ in range(2 if cache == "on" else 1):  # the second time, from the cache
        output = job.train(2, "tests/e2e/programs/branches.py", RANNC_CACHE=cache)
        assert output.count("agrees") == 2
        assert output.count("make the model's Python code take other branches (`if` on a tensor)") == 4
