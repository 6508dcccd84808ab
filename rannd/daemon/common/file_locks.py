"""File locks (flock) with a deadline. The kernel releases them when their holder dies for any reason."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rannd.daemon.common import descriptors
from rannd.errors import DaemonError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(path: str) -> int:
    """Open the lock file `path`, creating it if it is missing, and return its descriptor. Does not lock it.

    Raises:
        DaemonError: It cannot be opened or created.
    """
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as exc:
        scarce = exc.errno in descriptors.EXHAUSTED
        do = "close files, or raise the limit (ulimit -n)" if scarce else "check its type and permissions"
        raise DaemonError(f"the lock {path} cannot be opened: {exc.strerror}; {do}") from exc


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock if it is free; return whether it was taken."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(fd: int, path: str) -> bool:
    """Whether `path` still is the file of the descriptor: whoever cleans /tmp may have deleted it."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def write_pid(fd: int) -> None:
    """Write into the lock file who holds it."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)


def unlock(fd: int) -> None:
    """Release the lock; the descriptor stays open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def wait_lock(fd: int, deadline: float, *, shared: bool = False) -> bool:
    """Take the lock, waiting until `deadline` (time.monotonic, seconds); return whether it was taken.

    flock has no timeout and SIGALRM belongs to the user's script, so this polls with growing pauses.
    """
    pause = 0.001
    while not try_lock(fd, shared=shared):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return True


@contextmanager
def held(path: str, deadline: float, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock `path` inside the block.

    Raises:
        DaemonError: It was not free before `deadline` (time.monotonic, seconds).
    """
    fd = open_lock(path)
    try:
        if not wait_lock(fd, deadline, shared=shared):
            raise DaemonError(f"the lock {path} was not free in time; `rannd status` shows the running daemon")
        yield
    finally:
        os.close(fd)
