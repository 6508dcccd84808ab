"""Lightning's Trainer with strategy="rannc" on real ranks, beside strategy="ddp"; the program compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/lightning_jobs.py"
PARTS = "tests/e2e/programs/lightning_parts.py"
TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_LOG_LEVEL": "warn"}


@pytest.mark.parametrize("layout", first(1, ["itself", "child"]))
def test_it_trains_as_ddp_does_and_goes_on_with_other_ranks(job: Job, tmp_path: Path, layout: str) -> None:
    given = str(tmp_path), layout
    output = job.train(2, PROGRAM, "parity", *given, **{**TWO, "RANNC_LOG_LEVEL": "info"})
    assert output.count("parity is right") == 2
    assert "cannot be cached" not in output
    assert "no code of the model reads" not in output
    assert job.alone(PROGRAM, "resume", *given).count("resume is right") == 1
    assert job.train(2, PROGRAM, "resume", *given, **TWO).count("resume is right") == 2


@pytest.mark.parametrize("resumes", first(1, [False, True]))
def test_modules_that_steps_compute_with(job: Job, tmp_path: Path, resumes: bool) -> None:
    output = job.train(2, PARTS, "parity", str(tmp_path), **TWO)
    assert output.count("parity is right") == 2
    assert "traced" not in output
    if not resumes:
        return
    resumed = PARTS, "resume", str(tmp_path)
    assert job.alone(*resumed).count("resume is right") == 1
    assert job.train(2, *resumed, **TWO).count("resume is right") == 2


@pytest.mark.long
def test_mixed_precision(job: Job, tmp_path: Path) -> None:
    assert job.train(2, PROGRAM, "bf16", str(tmp_path), "child", **TWO).count("bf16 is right") == 2
