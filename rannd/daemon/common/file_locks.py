"""flock with a deadline. The kernel drops these locks when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rannd.errors import DaemonError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(path: str) -> int:
    """Descriptor of the lock file `path`, made where it is missing. Not locked yet.

    Raises:
        DaemonError: it cannot be opened or made.
    """
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as exc:
        raise DaemonError(f"the lock {path} cannot be opened: {exc.strerror}; look at what is there") from exc


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock if it is free now."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give the lock back, keep the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def wait_lock(fd: int, deadline: float, *, shared: bool = False) -> bool:
    """Take the lock, waiting until `deadline` (time.monotonic, seconds) at most; whether it was taken.

    flock knows no timeout and an alarm belongs to the user's script, hence the growing pauses.
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
    """Hold the lock `path` in the block.

    Raises:
        DaemonError: it was not free before `deadline` (time.monotonic, seconds).
    """
    fd = open_lock(path)
    try:
        if not wait_lock(fd, deadline, shared=shared):
            raise DaemonError(f"the lock {path} was not free in time; `rannd status` shows who runs")
        yield
    finally:
        os.close(fd)
