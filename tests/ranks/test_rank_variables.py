"""One list of the variables that tell a process its rank: all that read it agree, and none has a list of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rannd
from rannd.errors import LaunchError, UsageError
from rannd.log import loggers
from rannd.ranks.rank_variables import MPI_RANKS, PMIX, RANKS, WORLDS, slurm_local_size, torch_variables
from rannd.runner.resources.inherited import rank_here
from rannd.runner.watch import watcher
from rannd.runtime.comm.rendezvous import find_place

HOME = Path(rannd.__file__).parent
FILES = sorted(HOME.rglob("*.py"))


@pytest.mark.parametrize(("rank", "size"), [world[:2] for world in WORLDS])
def test_a_rank_is_the_same_to_all(rank: str, size: str) -> None:
    """But to the watcher, to which RANK is not its launcher's: whoever is around rannc-run may have set it."""
    environ = {rank: "2", size: "5"}
    here, there = rank_here(environ), find_place(environ)
    assert here is not None
    assert (here.rank, here.size, there.rank, there.size, there.launcher) == (2, 5, 2, 5, rank)
    assert loggers.rank_of(environ) == "2"
    assert watcher.rank_of(environ) == (None if rank == "RANK" else 2)


@pytest.mark.parametrize("first", range(len(WORLDS)))
def test_all_take_the_first(first: int) -> None:
    environ = {name: str(place) for place, (name, *_) in list(enumerate(WORLDS))[first:]}
    environ |= {size: "9" for _, size, *_ in WORLDS}
    here = rank_here(environ)
    assert here is not None
    assert (here.rank, find_place(environ).rank, loggers.rank_of(environ)) == (first, first, str(first))
    assert watcher.rank_of(environ) == (3 if WORLDS[first][0] == "RANK" else first)


def test_a_rank_without_a_size_has_a_name_only() -> None:
    """PMIx launchers tell no size: log files and watchers need none, a job does."""
    environ = {PMIX: "3"}
    assert loggers.rank_of(environ) == "3"
    assert watcher.rank_of(environ) == 3
    for place, error in ((rank_here, UsageError), (find_place, LaunchError)):
        with pytest.raises(error, match=rf"{PMIX}=3\) that does not say how many ranks"):
            place(environ)
    assert find_place({**environ, "RANK": "3", "WORLD_SIZE": "4"}).size == 4


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (dict(zip(WORLDS[0], "3412", strict=True)), "3412"),
        (dict(zip(WORLDS[1], "3412", strict=True)), "3412"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "343"),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
            | {"SLURM_STEP_TASKS_PER_NODE": "3,1"},
            "3401",
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "3412",
        ),
        (dict(zip(WORLDS[2], "3412", strict=True)), ""),
        ({"SLURM_PROCID": "0"}, ""),
        ({}, ""),
    ],
)
def test_a_rank_of_any_launcher_in_the_names_of_torchrun(environ: dict[str, str], told: str) -> None:
    """What the local size is, not every launcher says."""
    assert torch_variables(environ) == dict(zip(WORLDS[2], told, strict=False))


@pytest.mark.parametrize(
    ("text", "node", "size"), [("2(x3),1", "3", "1"), ("4", "1", ""), ("x", "0", ""), ("2", "-", "")]
)
def test_ranks_on_a_node_of_slurm(text: str, node: str, size: str) -> None:
    assert slurm_local_size({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}) == size


def test_the_lists_differ_only_where_they_say_so() -> None:
    assert len(set(RANKS)) == len(RANKS)
    assert set(RANKS) == {rank for rank, *_ in WORLDS} | {PMIX}
    assert set(RANKS) - set(MPI_RANKS) == {"RANK"}


def _lists(text: str) -> list[list[str]]:
    """The groups of two variables with a rank, or more, that a file has as literals of a tuple, list, set or dict."""
    groups = (
        [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in RANKS]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
    )
    return [group for group in groups if len(group) > 1]


def test_no_file_has_a_list_of_its_own() -> None:
    assert _lists('x = ("PMIX_RANK", "RANK")')
    assert _lists('x = (("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"))')
    assert not _lists('x = ("RANK", "WORLD_SIZE")\ny = "PMI_RANK"')
    found = {file.relative_to(HOME).as_posix() for file in FILES if _lists(file.read_text())}
    assert found == {"ranks/rank_variables.py"}
