"""A host file that is read again whenever it changes, while a job runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rannd.errors import UsageError
from rannd.runner.resources.host_list import read_hostfile

LOOK_S = 0.25
"""Seconds between two looks at the file: its place, size and time of change. Network file systems notify nobody."""
SETTLE_S = 0.5
"""Seconds for which the file has to stay as it is: editors write in several steps, and users make several changes."""

_Stamp = tuple[int, int, int] | None


class HostFile:
    """The hosts that a file names.

    Args:
        path: The file.
        say: Gets a line for the user.

    Raises:
        UsageError: It cannot be read, or a line is wrong. Later on such a file is told, and the hosts stay as they are.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._seen = self._settled = self._stamp()
        self._since = time.monotonic()
        self.hosts = read_hostfile(path)

    def changed(self) -> bool:
        """Look at the file; whether it names other hosts, or other slots, than `hosts` did, which are the new ones."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen, self._since = stamp, time.monotonic()
        if self._seen == self._settled or time.monotonic() < self._since + SETTLE_S:
            return False
        self._settled = self._seen
        before = self.hosts
        try:
            self.hosts = read_hostfile(self.path)
        except UsageError as error:
            self._say(f"{error}; the job goes on with the hosts that it had")
        return self.hosts != before

    def _stamp(self) -> _Stamp:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
