"""What somebody else does while a monitor watches a job, in the monitor's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rannd.ranks.memory_files import MOST_RANKS
from rannd.runner.watch.notice_socket import Notice, Noticed


@dataclass(frozen=True)
class HeldPart:
    """A rank's part of a step, in the memory of some watcher; fields as of rannd.ranks.memory_files."""

    number: int
    step: int
    rank: int
    size: int
    folder: str

    def __post_init__(self) -> None:
        numbers = (self.number, self.step, self.rank, self.size)
        if any(type(each) is not int for each in numbers) or not 0 <= self.rank < self.size <= MOST_RANKS:
            raise ValueError(f"no part of a step has the numbers {numbers}")
        if not isinstance(self.folder, str):
            raise ValueError(f"{self.folder!r} is no folder")


@dataclass(frozen=True)
class RescueOrder:
    """Which watchers write which parts of a step that ranks have kept in memory."""

    number: int
    """Of the step among those that were kept."""
    step: int
    folder: str
    """Where to write them."""
    parts: Mapping[int, Sequence[int]]
    """For each watcher, by its rank, the ranks whose parts it writes."""
    owners: Mapping[int, Sequence[int]]
    """For each rank, the watchers that have its part."""


class Errand(Protocol):
    """An errand of one job, such as to look for changes of its hosts."""

    leave_s: float
    """Seconds that ranks get to save and end by themselves, if rannc-run gets SIGTERM."""
    rescue_s: float
    """Seconds that watchers get to write what ranks have left in memory."""

    def due(self) -> float:
        """Return when it wants to run next, as of time.monotonic()."""

    def run(self, leave: Callable[[float], None]) -> None:
        """Run it; ``leave(seconds)`` asks all ranks to save and end by themselves within so many seconds."""

    def take_note(self, note: dict[str, Any]) -> None:
        """Take what a rank says of its training (rank_notes.py); a script can say anything there."""

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        """Return what is to be written of that which the ranks have left in memory; None: nothing.

        Args:
            held: What each watcher that is left has, by its rank.
            failed: Whether ranks have failed.
        """

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        """All is written, or ('' if not) `error` says why it is not."""

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        """Take the notice that a host goes away, which was given on the machine of a rank; return the answer."""
