"""`RaNNCAccelerator` on real ranks, beside Accelerate under DistributedDataParallel; the program compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/accelerator_jobs.py"
TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_LOG_LEVEL": "warn"}


def test_it_trains_as_accelerate_does_and_goes_on_with_other_ranks(job: Job, tmp_path: Path) -> None:
    assert job.train(2, PROGRAM, "parity", str(tmp_path), **TWO).count("parity is right") == 2
    assert job.alone(PROGRAM, "resume", str(tmp_path)).count("resume is right") == 1
    assert job.train(2, PROGRAM, "resume", str(tmp_path), **TWO).count("resume is right") == 2


@pytest.mark.long
@pytest.mark.parametrize("way", ["bf16", "pair", "separate"])
def test_mixed_precision_and_two_models(job: Job, tmp_path: Path, way: str) -> None:
    assert job.train(2, PROGRAM, way, str(tmp_path), **TWO).count(f"{way} is right") == 2


def test_ranks_that_accelerate_does_not_see_are_told(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from pyrannc.integrations.accelerate import RaNNCAccelerator\nRaNNCAccelerator()\n")
    output = job.train(2, str(script), code=1, CUDA_VISIBLE_DEVICES="")
    assert "the job has 2 ranks, but Accelerate sees 1, so that each would read the same data" in output
