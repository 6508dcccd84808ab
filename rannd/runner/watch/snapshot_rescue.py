"""The watchers write what ranks have left in memory, before they are dismissed."""

from __future__ import annotations

import time

from rannd.runner.watch.errand import RescueOrder


class Rescue:
    """Waits for the watchers that write.

    Args:
        order: What they were asked to write.
        limit_s: Seconds after which it is given up.
    """

    def __init__(self, order: RescueOrder, limit_s: float) -> None:
        self.order = order
        self.by = time.monotonic() + limit_s
        """When it is given up."""
        self.error = ""
        """Why not all is written."""
        self._left = set(order.parts)

    @property
    def over(self) -> bool:
        """Whether all have answered, or it was given up."""
        return not self._left

    def take(self, rank: int, error: str) -> None:
        """The watcher of a rank has written its parts, or could not."""
        if rank in self._left:
            self._left.remove(rank)
            self.error = self.error or error

    def hurry(self, limit_s: float) -> None:
        """Leave it only so many seconds more."""
        self.by = min(self.by, time.monotonic() + limit_s)

    def give_up(self, why: str) -> None:
        """Wait no longer."""
        self._left.clear()
        self.error = self.error or why
