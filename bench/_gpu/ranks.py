"""Ranks that share a device: processes with torchrun's variables, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from _gpu.machine import ROOT, Here

BENCH = ROOT / "bench"
TAIL = 12
"""Lines of a rank's output that a result shows."""


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    code: int | None
    """None: it had to be killed, as it did not end in time."""
    output: str
    """Both streams."""

    def tail(self) -> str:
        """Its last lines."""
        ending = "was killed, out of time" if self.code is None else f"exit code {self.code}"
        return f"{ending}: " + " / ".join(self.output.strip().splitlines()[-TAIL:])


def run(here: Here, ranks: int, script: str, *arguments: str, limit_s: float, **variables: str) -> list[Ended]:
    """Run a script as a job of some ranks on this machine, all with the same device.

    Args:
        here: The device.
        ranks: Number of ranks.
        script: Path below bench/, or from the root.
        arguments: Of the script.
        limit_s: Seconds after which ranks that still run are killed.
        variables: Added to the environment; transport is `staged`, unless they say otherwise.
    """
    path = BENCH / script if (BENCH / script).exists() else ROOT / script
    shared = {
        **os.environ,
        "RANNC_TRANSPORT": "staged",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": os.pathsep.join([str(BENCH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "RANNC_DEVICE": here.device.type,
        **variables,
    }
    started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                output = (Path(folder) / str(rank)).open("w+b")
                environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(path), *arguments]
                begun = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
                started.append((begun, output))
            return _end(started, limit_s)
        finally:
            for process, output in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                output.close()


def _end(started: Sequence[tuple[subprocess.Popen[bytes], IO[bytes]]], limit_s: float) -> list[Ended]:
    """Wait for ranks, and kill those that still run after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = []
    for process, _ in started:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    ended = []
    for (process, output), code in zip(started, codes, strict=True):
        if code is None:
            process.kill()
            process.wait()
        output.seek(0)
        ended.append(Ended(code, output.read().decode(errors="replace")))
    return ended


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
