"""The error of work beside the script (an asynchronous save): raised by the next collective call, else the exit code.

::

    the work fails ──► next collective call: `agree` of rannd.runtime.comm.lockstep raises it, on all ranks
           │
           └─ no call ──► exit: the error is the last line of standard error, and its exit code that of the process

An error of the script that ends the process comes first: then standard error and the exit code are Python's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from typing import NoReturn, Protocol

from rannd.errors import RanndError


class Work(Protocol):
    """Work in a thread, whose error all ranks have alike, though not at the same moment."""

    @property
    def unseen(self) -> RanndError | None:
        """Its error if the script has not seen it and no other call would say it, without waiting."""

    @property
    def untold(self) -> RanndError | None:
        """Its error if the script has not seen it, without waiting."""

    def join(self) -> None:
        """Wait for its end, well or not."""

    def raise_error(self) -> NoReturn:
        """Wait for its end, and raise its error."""


_work: Work | None = None
_pid = 0
"""Of the process that has the work: a forked child has not."""


def follow(work: Work) -> None:
    """Raise the error of this work, of the work before no longer."""
    global _work, _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        atexit.register(_exit)
    _work = work


def settle() -> None:
    """Wait for the end of the work. Its error is left to the next collective call, which raises it on all ranks."""
    if _work is not None:
        _work.join()


def known() -> RanndError | None:
    """The error that the next collective call raises, as far as this rank knows."""
    return _work.unseen if _work is not None and _pid == os.getpid() else None


def raise_known() -> None:
    """Raise the error that some rank knows; the others wait for theirs, which is on its way."""
    if _work is not None:
        _work.raise_error()


def _exit() -> None:
    """At exit, when the work has ended: Python waits for its thread first."""
    error = _work.untold if _work is not None and _pid == os.getpid() else None
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or isinstance(last, BaseException):
        return
    # Python has no way to change the exit code here but os._exit, which skips the other exit handlers. libc calls its
    # own handlers, the last one first, when Python is gone. Before the message, which may fail.
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc._exit, ctypes.c_void_p(error.exit_code), None)
    libc.__cxa_atexit(libc.fflush, None, None)
    kind = type(error)
    with contextlib.suppress(OSError, ValueError):
        print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr, flush=True)
