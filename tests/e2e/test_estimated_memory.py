"""Planned memory against what ranks use, on real jobs."""

from __future__ import annotations

import re
import sys

import pytest
from job import Job


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("model", ["linear 512 x 8", "digits 32"])
def test_no_step_uses_more_memory_than_planned(job: Job, model: str) -> None:
    output = job.run(sys.executable, "bench/estimates.py", "--memory", "--only", model)
    found = re.search(r"gradients kept: median error (\S+), used / planned (\S+) to (\S+)", output)
    assert found is not None, output
    error, _, most = map(float, found.groups())
    assert most <= 1.0, output
    assert error <= 0.05, output
