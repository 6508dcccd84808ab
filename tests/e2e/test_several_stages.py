"""What scripts do, with several stages on each rank: as under other plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from job import Job

pytestmark = pytest.mark.ranks
PROGRAMS = "tests/e2e/programs"


def placed(schedule: str, passes: int, program: str, *arguments: str, zero: int = 0) -> list[str]:
    """A command that runs a program with several stages per slot."""
    return [f"{PROGRAMS}/placed.py", schedule, str(passes), str(zero), f"{PROGRAMS}/{program}", *arguments]


def plan(stages: int, **more: str) -> dict[str, str]:
    return {"RANNC_PARTITION_NUM": str(stages), "RANNC_CACHE": "off", "RANNC_ZERO_STAGE": "0", **more}


def test_placement_changes_nothing(job: Job, tmp_path: Path) -> None:
    program, pieces = f"{PROGRAMS}/interleaved.py", 8
    job.train(4, program, str(tmp_path), RANNC_PARTITION_NUM="4", RANNC_PIPELINE_NUM="2")
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
                    here, there, rtol=1e-9, atol=1e-12, msg=lambda text, at=number: f"{schedule}, {at}: {text}"
                )


def test_x(job: Job, tmp_path: Path) -> None:
    import os
    what = os.environ["WHAT"].split()
    ranks, stages, schedule, passes, zero, program, *arguments = what
    more = dict(each.split("=") for each in os.environ.get("MORE", "").split())
    if schedule == "none":
        print(job.train(int(ranks), f"{PROGRAMS}/{program}", *arguments, **{"RANNC_PARTITION_NUM": stages, "RANNC_ZERO_STAGE": zero}, **more)[-6000:])
        return
    print(job.train(int(ranks), *placed(schedule, int(passes), program, *arguments, zero=int(zero)), **plan(int(stages), **more))[-6000:])
