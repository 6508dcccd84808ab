"""SIGUSR1: rannc-run, or a batch system, asks this rank to save and to end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from rannd.errors import UsageError


class LeaveRequest:
    """Whether this rank was asked to leave. A handler that the script had set for the signal is called as well.

    Raises:
        UsageError: Not in the main thread, where alone Python sets handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("pyrannc.elastic sets a handler of SIGUSR1, which Python allows in the main thread only")
        self._before: Any = signal.signal(signal.SIGUSR1, self._take)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        if callable(self._before):
            self._before(signum, frame)

    def close(self) -> None:
        """Put the handler back that was there before."""
        if signal.getsignal(signal.SIGUSR1) == self._take:
            signal.signal(signal.SIGUSR1, self._before if self._before is not None else signal.SIG_DFL)
