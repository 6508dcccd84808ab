"""rannc-run as a user calls it: a command, its output, its exit code."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sysconfig
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PROGRAMS = Path(__file__).resolve().parents[1] / "e2e" / "programs"
RANNC_RUN = Path(sysconfig.get_path("scripts")) / "rannc-run"
#: Far above what anything takes on a busy machine; reached only where something hangs.
LONG = 60


@dataclass
class Shell:
    """Starts rannc-run in an environment without daemon, tuning or anything of this process's own job."""

    home: Path
    environ: dict[str, str]
    command: tuple[str, ...] = (str(RANNC_RUN),)
    kind: str = "Open MPI"
    """Name of its launcher."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """A running ``rannc-run arguments``; its output is read by the test."""
        process = subprocess.Popen(
            [*self.command, *arguments],
            cwd=self.home,
            env={**self.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of ``rannc-run arguments``."""
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=LONG)
        return process.returncode, out, err

    def end(self) -> None:
        """Ends what a failed test left running."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)  # again: at once
                process.wait(LONG)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def a_shell(tmp_path: Path) -> Shell:
    """A shell in `tmp_path`; whoever asked for it ends it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANNC_", "OMPI_", "MALLOC_"))}
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        environ.pop(name, None)
    conf = tmp_path / "conf"
    conf.mkdir()
    return Shell(tmp_path, {**environ, "RANNC_CONF_DIR": str(conf), "RANNC_CACHE": "off"})


def program(name: str) -> str:
    """The path of one of the misbehaving programs."""
    return str(PROGRAMS / name)


def read_lines(stream: IO[str] | None, count: int) -> list[str]:
    """The next `count` lines."""
    assert stream is not None
    return [stream.readline().rstrip("\n") for _ in range(count)]


class Witness:
    """Sees when a process ends, whoever its parent is; one that is gone already has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        with suppress(ProcessLookupError):
            self._fd = os.pidfd_open(pid)

    def ended(self) -> bool:
        """Waits for its end; False where it lives on."""
        if self._fd is None:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        try:
            return bool(poll.poll(LONG * 1000))
        finally:
            os.close(self._fd)
