"""A monitor with real watchers, and a launcher that starts them as Slurm's srun or Open MPI's mpirun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import rannd
from rannd.runner.job import _WATCHER
from rannd.runner.watch.errand import Errand
from rannd.runner.watch.job_result import JobResult
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.monitor import Monitor
from rannd.runner.watch.watcher import SETTINGS_VARIABLE

# Starts the ranks as Slurm's srun does, waits for all, and ends as the worst of them.
SRUN = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[2:], env={**os.environ, "SLURM_PROCID": str(r)}) for r in range(int(sys.argv[1]))]
sys.exit(max(rank.wait() for rank in ranks))
"""
# Ends all ranks as soon as one has ended badly, as mpirun does.
MPIRUN = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[2:], env={**os.environ, "SLURM_PROCID": str(r)}) for r in range(int(sys.argv[1]))]
left = {rank.pid: rank for rank in ranks}
while left:
    pid, status = os.wait()
    del left[pid]
    if status:
        for rank in left.values():
            rank.terminate()
        sys.exit(1)
"""
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}


def run(
    listener: Listener,
    size: int,
    *command: str,
    started: int | None = None,
    token: str | None = None,
    start: float = 0.0,
    grace: float = 5.0,
    variables: Mapping[str, str] | None = None,
    launched: str = SRUN,
    errand: Errand | None = None,
) -> JobResult:
    """What becomes of ``python command`` on `size` ranks, of which `started` are started.

    Main thread only. `token`: another than the listener's; `start`: seconds within which ranks must start;
    `variables`: of launcher, watchers and ranks; `launched`: the launcher's program; `errand`: of the monitor.
    """
    settings = {"address": listener.address, "token": token or listener.token, "grace": grace, "log_dir": None}
    settings["notes"] = errand is not None
    root = str(Path(rannd.__file__).parents[1])
    watcher = [sys.executable, "-I", "-S", "-c", _WATCHER, root, sys.executable, *command]
    launcher = subprocess.Popen(
        [sys.executable, "-c", launched, str(size if started is None else started), *watcher],
        env={**ENVIRON, **(variables or {}), SETTINGS_VARIABLE: json.dumps(settings)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Monitor(listener, launcher, size, range(size), grace, start, errand=errand).run()
