"""Whole states and checkpoints on real ranks: saved under one plan, read under others; killed while saving."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks
PROGRAM = "tests/e2e/programs/checkpoints.py"
HALVES = {"RANNC_PARTITION_NUM": "2", "RANNC_MEM_LIMIT_GB": "0.0115"}
"""The whole model does not fit one rank: each has a part of it."""


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks, a stage each, have saved; they have checked a lot on the way."""
    folder = tmp_path_factory.mktemp("checkpoints")
    output = job.train(2, PROGRAM, "train", str(folder), **HALVES)
    assert output.count("finished on rank") == 2
    return folder


@pytest.mark.parametrize("mode", first(1, ["resume", "again"]))
def test_a_resumed_run_equals_one_that_was_not_stopped(job: Job, saved: Path, mode: str) -> None:
    output = job.train(2, PROGRAM, mode, str(saved), SAME_PLAN="yes", **HALVES)
    assert "went on fixed 2" in output
    assert "went on free 2" in output


@pytest.mark.parametrize(("ranks", "stages"), first(1, [(3, 3), (1, 1)]))
def test_other_plans_and_numbers_of_ranks_go_on(job: Job, saved: Path, ranks: int, stages: int) -> None:
    output = job.train(ranks, PROGRAM, "resume", str(saved), RANNC_PARTITION_NUM=str(stages))
    assert f"went on free {stages}" in output


@pytest.mark.parametrize("ranks", first(1, ["all", "last"]))
def test_a_kill_while_saving_leaves_the_last_checkpoint(job: Job, tmp_path: Path, ranks: str) -> None:
    job.train(2, PROGRAM, "kill", str(tmp_path), ranks, code=137, **HALVES)
    output = job.train(2, PROGRAM, "after_kill", str(tmp_path), **HALVES)
    assert output.count("finished on rank") == 2
