"""File descriptors that a process may still open. libzmq aborts the process when it needs one and there is none."""

from __future__ import annotations

import errno
import os
import resource

from rannd.errors import DaemonError

EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE))
"""Errors of a system call for which there is no descriptor left."""


def limit() -> int:
    """Return the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 30) if soft == resource.RLIM_INFINITY else soft


def free() -> int:
    """Return how many descriptors this process may still open.

    They are counted, not tried: another thread, such as libzmq's, could need one meanwhile.

    Raises:
        DaemonError: The open descriptors cannot be counted.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError as exc:
        if exc.errno in EXHAUSTED:
            return 0
        raise DaemonError(f"open descriptors cannot be counted: {exc.strerror}: {exc.filename}; mount /proc") from exc
    most = limit()
    return most - sum(int(name) < most for name in names) + 1  # the one with which the folder is read


def require(count: int, what: str) -> None:
    """Refuse to go on with fewer than `count` free descriptors.

    Raises:
        DaemonError: There are fewer. `what` names what needs them.
    """
    there = free()
    if there < count:
        raise DaemonError(
            f"{what} needs {count} file descriptors, and {max(there, 0)} of the {limit()} of this process are free; "
            "close files, or raise the limit (ulimit -n)"
        )
