"""GradScaler with a model in stages."""

from __future__ import annotations

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("schedule", "trained"),
    first(1, [("zb_h1", "frozen"), ("1f1b", "all"), ("zb_h1", "all"), ("asked", "all"), ("1f1b", "frozen")]),
)
def test_all_stages_skip_the_steps_that_one_overflows_in(job: Job, schedule: str, trained: str) -> None:
    how = {"RANNC_INTERLEAVE_LOSS": "false"} if schedule == "asked" else {"RANNC_SCHEDULE": schedule}
    output = job.train(2, "tests/e2e/programs/scaler.py", trained, RANNC_PARTITION_NUM="2", **how)
    assert "rank 0 skipped" in output
    assert "rank 1 skipped" in output
