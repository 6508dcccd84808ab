"""Scripts written for torchrun, unchanged under rannc-run: their own process group, in whatever order."""

from __future__ import annotations

import re

import pytest
from job import FORK, Job
from thinned import first

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/own_group.py"
SHARED = "init_process_group: the script uses the default process group that rannd has made (gloo, 2 ranks)"


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_single_rank_runs_the_same_script(job: Job, when: str) -> None:
    output = job.train(1, PROGRAM, when)
    assert "trained [0, 1, 0, 1]" in output, output
    assert output.count("the script uses the default process group that rannd has made (gloo, 1 rank)") == (
        when == "after"
    )
    assert "[error]" not in output


@pytest.mark.parametrize(
    ("when", "stages"),
    first(2, [("before", "1"), ("after", "2"), ("never", "2"), ("never", "1"), ("before", "2"), ("after", "1")]),
)
def test_the_scripts_group_and_rannds_do_not_collide(job: Job, when: str, stages: str) -> None:
    output = job.train(2, PROGRAM, when, RANNC_PARTITION_NUM=stages)
    assert sorted(re.findall(r"trained \[.*\]", output)) == ["trained [0, 2, 0, 2]", "trained [1, 2, 1, 2]"], output
    assert output.count(SHARED) == (when == "after")
    assert "[error]" not in output


def test_a_rank_of_mpirun_gets_the_same(job: Job) -> None:
    """rannc-run inside mpirun becomes the rank: all on this machine, so they meet here."""
    output = job.run("mpirun", "-np", "2", "--oversubscribe", "rannc-run", FORK, PROGRAM, "before")
    assert sorted(re.findall(r"trained \[.*?\]", output)) == ["trained [0, 2, 0, 2]", "trained [1, 2, 1, 2]"], output
