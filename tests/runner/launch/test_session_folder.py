"""What Open MPI keeps on disk while a job runs: out of the way of other jobs, and gone afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from test_orphans import Job
from transcript import LONG, Shell, program

from rannd.runner.launch import session_folder
from rannd.runner.launch.mpi import LauncherKind

pytestmark = pytest.mark.ranks


@pytest.fixture
def place(shell: Shell) -> Path:
    """Where temporary files go."""
    folder = shell.home / "tmp"
    folder.mkdir()
    shell.environ["TMPDIR"] = str(folder)
    return folder


def empty(folder: Path) -> bool:
    """Whether everything in it goes away."""
    end = time.monotonic() + LONG
    while list(folder.iterdir()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_nothing_is_left_after_a_job(shell: Shell, place: Path) -> None:
    code, _, err = shell.run("-np", "2", "--no-tune", program("speak.py"))
    assert code == 0, err
    assert not list(place.iterdir())
    assert shell.run("-np", "2", "--no-tune", program("exit_on_rank.py"), "1", "7")[0] == 7
    assert not list(place.iterdir())


@pytest.mark.parametrize("who", ["rannc-run", "launcher", "both"])
def test_nothing_is_left_after_a_sigkill(shell: Shell, place: Path, who: str) -> None:
    job = Job(shell)
    (own,) = place.glob("rannc-run-*")
    assert list(own.iterdir()), "Open MPI's"
    assert own.stat().st_mode & 0o777 == 0o700
    if who != "rannc-run":
        os.kill(job.launcher, signal.SIGKILL)
    if who != "launcher":
        job.process.kill()
    job.finish()
    assert job.all_ended()
    assert empty(place), list(place.rglob("*"))


def test_a_place_of_the_users_stays_theirs(tmp_path: Path) -> None:
    assert session_folder.make(LauncherKind.MPICH, {}) == {}
    assert session_folder.make(LauncherKind.OPEN_MPI, {"PRTE_MCA_prte_tmpdir_base": str(tmp_path)}) == {}
    made = session_folder.make(LauncherKind.OPEN_MPI, {})
    (folder,) = map(Path, made.values())
    (folder / "file").touch()
    session_folder.remove(made)
    assert not folder.exists()
    session_folder.remove(made)
