"""Runs programs with a library between them and libc, which logs their calls for files or lets one fail (shim.c)."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ERRORS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EMFILE", "EINTR")}
CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink")


@functools.cache
def shim() -> Path:
    """The library, compiled."""
    made = Path(tempfile.mkdtemp(prefix="rannd-faults-")) / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, HERE / "shim.c"], check=True)
    return made


def run(program: str, *arguments: str, under: Path, **variables: str) -> str:
    """Run a program of programs/ with the library; its output. AssertionError if it fails."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim()),
        "FAULTS_UNDER": str(under),
        "OMP_NUM_THREADS": "1",
        "RANNC_CACHE": "off",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "programs" / program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


class Faults:
    """The library in this process, which was started by `run`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_seen.restype = ctypes.c_long

    def plan(self, call: str = "", number: int = 0, error: int = 0) -> None:
        """Let the `number`-th `call` from now on fail; without arguments none."""
        self._library.faults_plan(f"{call} {number} {error}".encode() if call else b"")

    def seen(self, call: str) -> int:
        """How many such calls there were since `plan`."""
        return int(self._library.faults_seen(call.encode()))
