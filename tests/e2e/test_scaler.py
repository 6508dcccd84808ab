"""GradScaler with a model in stages."""

from __future__ import annotations

import pytest
from job import Job

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("interleaved", "trained"), [("true", "all"), ("false", "all"), ("true", "frozen")])
def test_all_stages_skip_the_steps_that_one_overflows_in(job: Job, interleaved: str, trained: str) -> None:
    output = job.train(
        2, "tests/e2e/programs/scaler.py", trained, RANNC_PARTITION_NUM="2", RANNC_INTERLEAVE_LOSS=interleaved
    )
    assert "rank 0 skipped" in output
    assert "rank 1 skipped" in output
