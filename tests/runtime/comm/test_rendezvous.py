"""Who a process is, from what launchers say."""

from __future__ import annotations

import pytest

from rannd.errors import LaunchError
from rannd.runtime.comm.rendezvous import LaunchedRank, find_place


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, LaunchedRank()),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            LaunchedRank(3, 4, 1, "OMPI_COMM_WORLD_RANK"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, LaunchedRank(0, 2, 0, "PMI_RANK")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, LaunchedRank(1, 2, 0, "RANK")),
        ({"RANK": "1"}, LaunchedRank()),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
            LaunchedRank(1, 2, 0, "SLURM_PROCID"),
        ),
        # The script of sbatch, which is one process whatever the job has been given.
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
            LaunchedRank(),
        ),
    ],
)
def test_find_place(environ: dict[str, str], place: LaunchedRank) -> None:
    assert find_place(environ) == place


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 has to be at least 0 and less than WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, r"RANK='one', WORLD_SIZE='2': both have to be integers"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_place(environ)
