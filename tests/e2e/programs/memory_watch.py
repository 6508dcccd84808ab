"""The most private memory that a process has in use, and a limit for it."""

from __future__ import annotations

import resource
import threading
from pathlib import Path


def private_mib() -> int:
    """Private memory in use; mapped files do not count."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:"))


class MemoryWatch(threading.Thread):
    """Looks at the private memory in use, in MiB, a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, private_mib())

    def end(self) -> int:
        """Stop looking; returns the most."""
        self._ended.set()
        self.join()
        return self.most


def limit(mib: int) -> None:
    """Limit private memory, into which mapped files do not count (RLIMIT_DATA)."""
    resource.setrlimit(resource.RLIMIT_DATA, (mib << 20, mib << 20))
