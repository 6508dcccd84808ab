"""Slurm's srun, or what stands in for it: as the launcher of rannc-run, and with rannc-run in each of its ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from other_launchers import environment_without_mpi
from stand_in_srun import install, recorded
from test_launchers import TRAIN
from test_run import test_ranks_have_the_names_of_torchrun  # noqa: F401 - the same under srun
from transcript import Shell, a_shell, program

pytestmark = pytest.mark.ranks


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell on a machine that has srun and no MPI."""
    srun = install(tmp_path / "bin", tmp_path / "record.json")
    made = a_shell(tmp_path)
    made.environ["PATH"] = str(srun.parent)
    made.command = environment_without_mpi(tmp_path / "venv")
    yield made
    made.end()


def test_ranks_train_under_srun(shell: Shell, forks: Path) -> None:
    (shell.home / "train.py").write_text(TRAIN)
    code, out, err = shell.run("-np", "2", fork_server.__file__, "train.py", **{fork_server.VARIABLE: str(forks)})
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
    options = ["--cpu-bind=none", "--overcommit", "--kill-on-bad-exit=0", "--export=ALL", "--ntasks=2"]
    arguments = recorded(shell.home / "record.json")
    assert arguments[: len(options)] == options
    assert arguments[-1] == "train.py"


def test_the_exit_code_is_the_first_failing_ranks(shell: Shell) -> None:
    code, _, err = shell.run("-np", "3", "--no-tune", program("exit_on_rank.py"), "1", "7")
    assert code == 7
    assert "rannc-run: 1 of 3 ranks failed:" in err
    assert "ended by rannc-run: ranks 0, 2" in err


def test_two_hosts_get_as_many_ranks_each(shell: Shell) -> None:
    code, out, _ = shell.run("--hosts", "localhost:1,127.0.0.1:1", "--dry-run", program("speak.py"))
    assert code == 0
    assert "launcher: slurm 23.11.4" in out
    here = shell.run("--hosts", "a:2,b:3", "--dry-run", program("speak.py"))
    assert here[0] == 2
    assert "srun places the same number of ranks on each host" in here[2]


ALLOCATION = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_slurm_places_ranks_on_its_own_nodes(shell: Shell) -> None:
    allocation = {**ALLOCATION, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    code, out, err = shell.run("--dry-run", program("speak.py"), **allocation)
    assert (code, err) == (0, "")
    assert re.search(r"^rank 3: host n2, local rank 1", out, re.M)
    told = "SLURM_JOB_NODELIST=n[1-2], SLURM_TASKS_PER_NODE=2(x2); srun places the ranks"
    assert f"hosts: from {told}\n" in out
    assert "--ntasks=4" in out
    assert "--nodelist" not in out
    assert "  MASTER_ADDR=n1\n" in out


def test_hosts_of_the_user_are_named_to_srun(shell: Shell) -> None:
    allocation = {**ALLOCATION, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    code, out, _ = shell.run("--hosts", "n2:2", "--dry-run", program("speak.py"), **allocation)
    assert code == 0
    assert "hosts: from --hosts\n" in out
    assert "--nodelist=n2 --ntasks-per-node=2" in out


def test_a_rank_of_srun_is_adopted_and_meets_the_others_without_mpi(shell: Shell, forks: Path) -> None:
    """srun rannc-run train.py"""
    (shell.home / "train.py").write_text(TRAIN)
    srun, own = str(shell.home / "bin" / "srun"), shell.command
    shell.command = (srun, "--ntasks=2", *own)
    # The host has to be one that can be reached: the node list is of one node, which is then this machine.
    variables = {**ALLOCATION, fork_server.VARIABLE: str(forks)}
    code, out, err = shell.run("--no-tune", fork_server.__file__, "train.py", **variables)
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
    told = f"rannc-run: already rank 0 of 2, started by Slurm's srun: running {fork_server.__file__} as it\n"
    assert err.count(told) == 1


def test_ranks_of_srun_agree_on_where_to_meet(shell: Shell) -> None:
    names = ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    shell.command = (str(shell.home / "bin" / "srun"), "--ntasks=2", *shell.command)
    code, out, _ = shell.run(program("environ.py"), *names, **ALLOCATION, SLURM_CPUS_PER_TASK="3")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert first == second
    assert (first["MASTER_ADDR"], first["OMP_NUM_THREADS"]) == ("127.0.0.1", "3")
    assert 20000 <= int(first["MASTER_PORT"]) < 32768
    _, other, _ = shell.run(program("environ.py"), *names, **ALLOCATION, MASTER_ADDR="x", MASTER_PORT="1")
    assert {json.loads(line)["MASTER_ADDR"] for line in other.splitlines()} == {"x"}


def test_a_shell_of_srun_is_no_rank(shell: Shell) -> None:
    """srun --pty bash: a step of one, in which ranks are started as anywhere else."""
    pty = {**ALLOCATION, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "PMI_RANK": "0"}
    pty |= {"PMI_SIZE": "1", "SLURM_JOB_NODELIST": os.uname().nodename, "SLURM_TASKS_PER_NODE": "1"}
    code, out, err = shell.run("-np", "2", "--no-tune", program("speak.py"), **pty)
    assert code == 0, err
    assert len(re.findall(r'"rank": "[01]"', out)) == 2
    assert "already rank" not in err
