"""Runs programs with a library between them and libc, which logs their calls or lets one fail (shim.c)."""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import itertools
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
ERRORS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EMFILE", "EINTR")}
CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink")
SOCKET_CALLS = ("socket", "bind", "listen", "connect", "accept", "send", "recv", "poll")
ALL_CALLS = ("open", "read", "write", "fsync", "rename", "mkdir", "unlink", *SOCKET_CALLS)
"""Those of shim.c, in its order."""
LONGEST_S = 3000
"""Seconds that all calls with all errors may take on a busy machine; a single one that hangs ends a program sooner."""
MOST_CALLS = 24
"""Number of calls of one kind that fail with all errors; more are alike."""


@functools.cache
def shim() -> Path:
    """The library, compiled."""
    folder = tempfile.mkdtemp(prefix="rannd-faults-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, HERE / "shim.c"], check=True)
    return made


def errors_of(call: str) -> tuple[int, ...]:
    """How a call may fail; 0: it does half of its work."""
    if call == "poll":
        return (errno.EINTR,)  # the only error that the kernel has for it
    found = tuple(ERRORS.values())
    if call in SOCKET_CALLS:
        found += (errno.ECONNRESET,)
    return found + ((0,) if call in ("write", "send", "recv") else ())


def failures(counts: Mapping[str, int], most: int | None) -> Iterator[tuple[str, int, int]]:
    """Calls of each kind with all of their errors; or `most` of each kind with one error, by turns."""
    turn = itertools.count()
    for call, count in counts.items():
        errors = errors_of(call)
        if most is None:
            yield from ((call, number, error) for number in _spread(count, MOST_CALLS) for error in errors)
        else:
            yield from ((call, number, errors[next(turn) % len(errors)]) for number in _spread(count, most))


def _spread(count: int, most: int) -> list[int]:
    """At most so many numbers from 1 to `count`, the first and the last among them."""
    return sorted({1 + each * (count - 1) // max(most - 1, 1) for each in range(most)})


def words(call: str, number: int, error: int) -> str:
    """Name of a failure in messages."""
    return f"{call} {number} with {errno.errorcode.get(error, 'half of the data')}"


def run(program: str, *arguments: str, under: Path, **variables: str) -> str:
    """Run a program of programs/ with the library; its output. AssertionError if it fails."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim()),
        "FAULTS_UNDER": str(under),
        "OMP_NUM_THREADS": "1",
        "RANNC_CACHE": "off",
        "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "programs" / program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
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


class FaultsElsewhere:
    """The library in processes that are started with FAULTS_CONTROL=`path`."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8 * (3 + len(ALL_CALLS))))
        with path.open("r+b") as opened:
            self._plan = mmap.mmap(opened.fileno(), 0)
        self.plan()

    def plan(self, call: str = "", number: int = 0, error: int = 0) -> None:
        """Let the `number`-th `call` of them together fail from now on; without arguments none."""
        kind = ALL_CALLS.index(call) if call else -1
        struct.pack_into(f"{2 + len(ALL_CALLS)}q", self._plan, 8, 0, error, *itertools.repeat(0, len(ALL_CALLS)))
        struct.pack_into("q", self._plan, 0, kind)
        struct.pack_into("q", self._plan, 8, number)

    def seen(self, call: str) -> int:
        """How many such calls there were since `plan`."""
        return int(struct.unpack_from("q", self._plan, 8 * (3 + ALL_CALLS.index(call)))[0])
