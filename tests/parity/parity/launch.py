"""Starts real ranks for many cases at once and collects what they record.

A start of ranks costs seconds, so all cases of one number of ranks run in one start, as forks of a process that has
torch imported. A case that fails or hangs ends its start; the cases behind it run in the next one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import fork_server
import psutil

from parity.case import Case, encode_cases
from parity.record import Record, load

CASE_SECONDS = 300.0
"""A case that takes longer hangs. Generous: the machine may be busy."""

MAX_STARTS = 12
"""After so many starts the remaining cases are reported as not run."""

WORKER = Path(__file__).resolve().parent.parent / "worker.py"


@dataclass
class Outcome:
    """What became of a case: a record for each rank, or the reason why there is none."""

    records: list[Record] = field(default_factory=list)
    error: str = ""


class Home:
    """Private configuration, cache and runtime directories, in which jobs run and their daemon lives.

    Args:
        forks: Socket of the fork server that ranks are taken from (tests/fork_server.py); None: they start themselves.
    """

    def __init__(self, forks: Path | None = None) -> None:
        self.forks = forks
        # short: the path of a socket has at most 107 bytes; mkdtemp makes it ours and 0700
        self.path = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
        for name in ("conf", "cache", "run", "home"):
            (self.path / name).mkdir(mode=0o700)
        (self.path / "conf" / "rannc_conf.toml").touch()
        self._jobs = 0

    def environment(self) -> dict[str, str]:
        """Variables of a job, without any RANNC_* that the caller has set."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANNC_")}
        return {
            **inherited,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl": "^ofi",
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.path / "home"),
            "TMPDIR": str(self.path / "home"),
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "XDG_RUNTIME_DIR": str(self.path / "run"),
            "RANNC_CONF_DIR": str(self.path / "conf"),
            "RANNC_DAEMON_TIMEOUT_S": "60",  # the disk of a busy machine may take longer than the default
        }

    def folder(self) -> Path:
        """A new folder for one job's files."""
        self._jobs += 1
        path = self.path / f"job{self._jobs}"
        path.mkdir()
        return path

    def strays(self) -> list[psutil.Process]:
        """Processes that live in this home: its daemon, and ranks that outlived their job."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.path / "run"):
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return mine

    def close(self) -> None:
        """Ends what still runs here and removes everything."""
        strays = self.strays()
        for process in strays:
            process.terminate()
        _, alive = psutil.wait_procs(strays, timeout=15)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=15)
        shutil.rmtree(self.path)


def run(
    cases: list[Case], home: Home, backend: Literal["rannc", "ddp"] = "rannc", case_seconds: float = CASE_SECONDS
) -> dict[str, Outcome]:
    """Trains the cases, all of one number of ranks, on real ranks. Outcomes by the name of the case."""
    (ranks,) = {case.ranks for case in cases}
    folder = home.folder()
    (folder / "cases.json").write_bytes(encode_cases(cases))
    outcomes: dict[str, Outcome] = {}
    first = 0
    for _ in range(MAX_STARTS):
        log = _start(ranks, backend, first, folder, home, case_seconds * (len(cases) - first) + 120, case_seconds)
        while first < len(cases):
            done = [folder / f"{first}.rank{rank}.npz" for rank in range(ranks)]
            if not all(path.exists() for path in done):
                break
            outcomes[cases[first].name] = Outcome(records=[load(path) for path in done])
            first += 1
        if first == len(cases):
            return outcomes
        outcomes[cases[first].name] = Outcome(error=_reason(first, folder, log))
        first += 1
        if first == len(cases):
            return outcomes
    for case in cases[first:]:
        outcomes[case.name] = Outcome(error=f"not run: {MAX_STARTS} cases before it failed or hung")
    return outcomes


def _start(ranks: int, backend: str, first: int, folder: Path, home: Home, seconds: float, case_seconds: float) -> Path:
    """One start of all ranks, to its end. Returns the file with what they printed."""
    mpirun = Path(sysconfig.get_path("scripts")) / "mpirun"
    command = [str(mpirun), "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, *([fork_server.__file__] if home.forks else [])]
    command += [str(WORKER), backend, str(first), str(folder)]
    log = folder / f"start{first}.log"
    environment = {**home.environment(), "PARITY_CASE_SECONDS": str(case_seconds)}
    if home.forks:
        # Ranks that know where to meet do not start MPI, which wants to be in the process that mpirun started.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        environment |= {fork_server.VARIABLE: str(home.forks), **meeting}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass  # the file of the case under way says where it hangs
        finally:
            if process.poll() is None:
                process.terminate()  # mpirun passes it on to the ranks
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()  # the ranks die with it, see worker.py
                    process.wait()
    return log


def _reason(number: int, folder: Path, log: Path) -> str:
    """Why a case has no record: tracebacks of its ranks, where they hang, or what they printed."""
    parts = []
    for suffix, title in (("error", "raised"), ("stuck", "hangs")):
        for path in sorted(folder.glob(f"{number}.rank*.{suffix}")):
            text = path.read_text(errors="replace").strip()
            if text:
                parts.append(f"--- {path.name}: {title}\n{text}")
    tail = log.read_text(errors="replace").strip().splitlines()[-40:]
    return "\n".join([*parts, "--- the end of what the ranks printed", *tail])
