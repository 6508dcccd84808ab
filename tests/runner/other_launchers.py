"""rannc-run with MPICH and Intel MPI, each from its wheel in an environment of its own (.ci/launchers)."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from transcript import Shell, a_shell

FOLDER = Path(sys.prefix) / "launchers"
NAMES = {"mpich": "MPICH", "impi-rt": "Intel MPI"}
COMMAND = "from rannd.runner.run import main; main(prog_name='rannc-run')"


def other_shell(name: str, tmp_path: Path) -> Iterator[Shell]:
    """A shell whose rannc-run finds one of these launchers."""
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        assert not os.environ.get("CI"), f"make test installs {name} on machines of CI"
        pytest.skip(f"there is no wheel of {name} for this machine, or make test has not been run")
    made = a_shell(tmp_path)
    made.command = (str(python), "-c", COMMAND)
    made.kind = NAMES[name]
    yield made
    made.end()


def environment_without_mpi(folder: Path) -> tuple[str, ...]:
    """The command rannc-run of a new environment that has what this one has, but for MPI."""
    options = ["--without-pip", "--system-site-packages"]
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return (str(folder / "bin" / "python"), "-c", COMMAND)
