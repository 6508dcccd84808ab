"""What somebody else does while a monitor watches a job, in the monitor's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rannd.runner.watch.notice_socket import Notice, Noticed


class Errand(Protocol):
    """An errand of one job, such as to look for changes of its hosts."""

    leave_s: float
    """Seconds that ranks get to save and end by themselves, if rannc-run gets SIGTERM."""

    def due(self) -> float:
        """Return when it wants to run next, as of time.monotonic()."""

    def run(self, leave: Callable[[float], None]) -> None:
        """Run it; ``leave(seconds)`` asks all ranks to save and end by themselves within so many seconds."""

    def take_note(self, note: dict[str, Any]) -> None:
        """Take what a rank says of its training (rank_notes.py); a script can say anything there."""

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        """Take the notice that a host goes away, which was given on the machine of a rank; return the answer."""
