"""The public API on real ranks; each program asserts what it says."""

from __future__ import annotations

import pytest
from job import Job

pytestmark = pytest.mark.ranks

TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


def test_clipping_is_over_the_whole_model(job: Job) -> None:
    output = job.train(2, "tests/e2e/programs/clipping.py", **TWO)
    assert output.count("clipping is right on rank") == 2
