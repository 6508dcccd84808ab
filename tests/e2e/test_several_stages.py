"""What scripts do, with several stages on each rank: as under other plans."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from job import FROM_CACHE, Job
from thinned import first

pytestmark = pytest.mark.ranks
PROGRAMS = "tests/e2e/programs"


def placed(schedule: str, passes: int, program: str, *arguments: str, zero: int = 0) -> list[str]:
    """A command that runs a program with several stages per slot."""
    return [f"{PROGRAMS}/placed.py", schedule, str(passes), str(zero), f"{PROGRAMS}/{program}", *arguments]


def plan(stages: int, **more: str) -> dict[str, str]:
    return {"RANNC_PARTITION_NUM": str(stages), "RANNC_ZERO_STAGE": "0", **more}


@pytest.mark.long
def test_placement_changes_nothing(job: Job, tmp_path: Path) -> None:
    program, pieces = f"{PROGRAMS}/interleaved.py", 8
    job.train(4, program, str(tmp_path), **plan(4, RANNC_PIPELINE_NUM="2", RANNC_SCHEDULE="1f1b"))
    wanted = torch.load(tmp_path / "1f1b-4.pt", weights_only=True)
    for ranks in (2, 4):
        for schedule in ("interleaved_1f1b", "zb_v"):
            command = placed(schedule, 2, "interleaved.py", str(tmp_path))
            output = job.train(ranks, *command, **plan(4, RANNC_PIPELINE_NUM=str(pieces // ranks)))
            assert output.count(f"has trained under {schedule}") == ranks
            found = torch.load(tmp_path / f"{schedule}-{ranks}.pt", weights_only=True)
            assert len(found) == len(wanted) > 30
            for number, (here, there) in enumerate(zip(found, wanted, strict=True)):
                torch.testing.assert_close(
                    here, there, rtol=1e-9, atol=1e-12, msg=partial("{} {}: {}".format, schedule, number)
                )


@pytest.mark.long
def test_the_planner_places_stages_itself(job: Job, tmp_path: Path) -> None:
    asked = {"RANNC_SCHEDULE": "interleaved_1f1b", "RANNC_VIRTUAL_STAGES": "2", "RANNC_PIPELINE_NUM": "4"}
    output = job.train(2, f"{PROGRAMS}/interleaved.py", str(tmp_path), RANNC_PARTITION_NUM="4", **asked)
    assert output.count("has trained under interleaved_1f1b") == 2
    output = job.train(2, f"{PROGRAMS}/interleaved.py", str(tmp_path), RANNC_PARTITION_NUM="4", **asked)
    assert FROM_CACHE in output


@pytest.mark.parametrize(
    ("schedule", "zero"),
    first(1, [("interleaved_1f1b", 3), ("zb_v", 1), ("interleaved_1f1b", 1)]),
)
def test_replicas_share_state_and_checkpoints_go_on_under_other_plans(
    job: Job, tmp_path: Path, schedule: str, zero: int
) -> None:
    command = placed(schedule, 2, "sharded.py", "train", str(tmp_path / "saved"), zero=zero)
    output = job.train(4, *command, **plan(4))
    assert output.count(f"is right under 4 stages, ZeRO {zero}") == 4
    plain = {"RANNC_PARTITION_NUM": "1", "RANNC_ZERO_STAGE": "0"}
    output = job.train(1, f"{PROGRAMS}/sharded.py", "resume", str(tmp_path / "saved"), **plain)
    assert "is right under 1 stages, ZeRO 0" in output


def test_a_checkpoint_of_another_plan_goes_on(job: Job, tmp_path: Path) -> None:
    variables = {"RANNC_PARTITION_NUM": "1", "RANNC_ZERO_STAGE": "1"}
    job.train(2, f"{PROGRAMS}/sharded.py", "train", str(tmp_path / "saved"), **variables)
    command = placed("interleaved_1f1b", 2, "sharded.py", "resume", str(tmp_path / "saved"), zero=2)
    assert job.train(4, *command, **plan(4)).count("is right under 4 stages, ZeRO 2") == 4


@pytest.mark.long
def test_compiled_stages_compute_the_same(job: Job) -> None:
    command = placed("interleaved_1f1b", 2, "compiled.py", "8", "0.0", "aot_eager")
    compiled = job.train(2, *command, **plan(4, RANNC_PIPELINE_NUM="2", RANNC_COMPILE_STAGES="blocks"))
    assert "kinds of blocks" in compiled
    plain = job.train(2, *command, **plan(4, RANNC_PIPELINE_NUM="2"))
    assert losses(compiled) == losses(plain) != []


def losses(output: str) -> list[str]:
    return sorted(re.findall(r"step \d: [\d.]+", output))


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("model", r"microbatch \d of rank \d's mini-batch, action F\d\.\1 \(forward\)"),
        ("backward", r"microbatch \d of rank \d's mini-batch, action B\d\.\1 \(backward\)"),
    ],
)
def test_an_error_names_the_stage_of_the_action(job: Job, what: str, place: str) -> None:
    command = placed("interleaved_1f1b", 2, "failing.py", what, "1", "catch")
    output = job.train(2, *command, **plan(4))
    assert re.search(rf"RankFailedError: rank \d \(.*, pid \d+\) failed in step 3, stage (\d), {place}: ", output), (
        output
    )


@pytest.mark.long
def test_a_rank_that_is_gone_is_named_with_its_stages(job: Job) -> None:
    command = placed("interleaved_1f1b", 2, "failing.py", "kill", "1")
    output = job.run("rannc-run", "-np", "2", *command, code=137, **plan(4))
    assert re.search(r"\[error\] rank 1 \(.*\), which runs stages 1, 3, has ended without an error message", output), (
        output
    )
