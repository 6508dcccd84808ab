"""What jobs leave behind, and what grows: processes, files, shared memory, the daemon. Seen from outside, in /proc."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "SOAK_JOB"
"""Variable that each process of a job has in its environment. The daemon keeps no such variable."""
SHARED = Path("/dev/shm")


def processes_of(mark: str) -> dict[int, list[str]]:
    """Command lines of the running processes of a job, by pid. Zombies have no environment, and are not among them."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it ended meanwhile, or is somebody else's
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text(errors="replace").split("\0")[:-1]
    return found


def below(folder: Path) -> set[str]:
    """Everything in a folder, by the path from its parent on."""
    return {str(path.relative_to(folder.parent)) for path in folder.rglob("*")}


def temporary(folder: Path) -> list[str]:
    """What is in a directory for temporary files, but for torch's own folder, which has the same name for all jobs."""
    return sorted(path for path in below(folder) if not path.startswith(f"{folder.name}/torchinductor_"))


def shared_memory() -> set[str]:
    """Names in /dev/shm that are ours."""
    names = set()
    for path in SHARED.rglob("*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                names.add(str(path))
    return names


def unused(paths: set[str]) -> set[str]:
    """Those of the files that no process has open or mapped: nobody will remove them."""
    used = set()
    for entry in os.listdir("/proc") if paths else ():
        if entry.isdecimal():
            with suppress(OSError):
                maps = Path(f"/proc/{entry}/maps").read_text(errors="replace")
                used |= {path for path in paths if path in maps}
                for fd in os.scandir(f"/proc/{entry}/fd"):
                    with suppress(OSError):
                        used.add(os.readlink(fd.path))
    return {path for path in paths - used if os.path.exists(path)}


@dataclass(frozen=True)
class DaemonSample:
    """The daemon at one moment.

    Attributes:
        jobs: Jobs that had ended.
        rss: Resident memory in bytes.
        zombies: Its children that have ended, and that it does not reap.
        listening: Sockets of the network at which it listens.
    """

    jobs: int
    pid: int
    rss: int
    fds: int
    threads: int
    zombies: int
    listening: int

    def __str__(self) -> str:
        return f"daemon {self.pid}: {self.rss / 2**20:.1f} MiB, {self.fds} fds, {self.threads} threads"


def look_at_daemon(runtime: Path, jobs: int) -> DaemonSample | None:
    """The daemon of a runtime directory; None if none lives there now."""
    for life in runtime.glob("rannd/*.life"):
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int(life.read_text()))
            if not any(os.path.realpath(fd.path) == str(life) for fd in os.scandir(f"/proc/{process.pid}/fd")):
                continue  # a number alone may be somebody else's by now
            sockets = process.net_connections(kind="inet")
            return DaemonSample(
                jobs,
                process.pid,
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
                sum(child.status() == psutil.STATUS_ZOMBIE for child in process.children()),
                sum(each.status == psutil.CONN_LISTEN for each in sockets),
            )
    return None


def growth(values: Sequence[float]) -> float:
    """Median of the last third less that of the first; 0 for fewer than six values."""
    third = len(values) // 3
    return statistics.median(values[-third:]) - statistics.median(values[:third]) if third > 1 else 0.0
