"""Planned memory against what ranks use, on real jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job import Job
from kept_results import KEPT, goals


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("model", ["linear 512 x 8", "digits 32"])
def test_no_step_uses_more_memory_than_planned(job: Job, model: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    output = job.run(sys.executable, "bench/estimates.py", "--memory", "--only", model, **{KEPT: str(kept)})
    found = goals(kept)
    assert found["estimate-memory-most"][0] <= 1.0, output
    assert found["estimate-memory"][0] <= 0.05, output
