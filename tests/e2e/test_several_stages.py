"""What scripts do, with several stages on each rank: as under other plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job

pytestmark = pytest.mark.ranks
PROGRAMS = "tests/e2e/programs"


def placed(schedule: str, passes: int, program: str, *arguments: str, zero: int = 0) -> list[str]:
    """A command that runs a program with several stages per slot."""
    return [f"{PROGRAMS}/placed.py", schedule, str(passes), str(zero), f"{PROGRAMS}/{program}", *arguments]


def plan(stages: int, **more: str) -> dict[str, str]:
    return {"RANNC_PARTITION_NUM": str(stages), "RANNC_CACHE": "off", "RANNC_ZERO_STAGE": "0", **more}


def test_x(job: Job, tmp_path: Path) -> None:
    import os
    what = os.environ["WHAT"].split()
    ranks, stages, schedule, passes, zero, program, *arguments = what
    more = dict(each.split("=") for each in os.environ.get("MORE", "").split())
    if schedule == "none":
        print(job.train(int(ranks), f"{PROGRAMS}/{program}", *arguments, **{"RANNC_PARTITION_NUM": stages, "RANNC_ZERO_STAGE": zero}, **more)[-6000:])
        return
    print(job.train(int(ranks), *placed(schedule, int(passes), program, *arguments, zero=int(zero)), **plan(int(stages), **more))[-6000:])
