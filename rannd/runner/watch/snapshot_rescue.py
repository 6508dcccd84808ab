"""The watchers write what ranks have left in memory, before they are dismissed."""

from __future__ import annotations

import time
from collections.abc import Callable

from rannd.runner.watch.errand import RescueOrder


class Rescue:
    """Asks watchers to write, and waits for them. What one cannot write is asked of another that has it, too.

    Args:
        order: What they are asked to write.
        ask: Asks a watcher, by its rank, to write the part of a rank; called again for it only after its answer.
        limit_s: Seconds after which it is given up.
    """

    def __init__(self, order: RescueOrder, ask: Callable[[int, int], None], limit_s: float) -> None:
        self.order = order
        self.by = time.monotonic() + limit_s
        """When it is given up."""
        self.error = ""
        """Why not all is written."""
        self._ask = ask
        self._parts = {watcher: list(parts) for watcher, parts in order.parts.items()}
        """What each watcher has to write; it was asked for the first."""
        self._owners = {part: set(watchers) for part, watchers in order.owners.items()}
        """Who can write what is not written."""
        for watcher, parts in self._parts.items():
            ask(watcher, parts[0])

    @property
    def over(self) -> bool:
        """Whether all is written, or it was given up."""
        return not self._parts

    def take(self, watcher: int, error: str) -> None:
        """A watcher has written the part that it was asked for last; `error`: why it could not."""
        if watcher not in self._parts:
            return
        part, *others = self._parts.pop(watcher)
        if error:
            self._owners[part].discard(watcher)
            self._find_another(part, error)
        if others and not self.error:
            self._parts[watcher] = others
            self._ask(watcher, others[0])

    def lose(self, watcher: int, error: str) -> None:
        """A watcher is gone; `error` says how."""
        for owners in self._owners.values():
            owners.discard(watcher)
        for part in self._parts.pop(watcher, ()):
            self._find_another(part, error)

    def _find_another(self, part: int, error: str) -> None:
        if not self._owners[part]:
            self.give_up(error)
        if not self.error:
            watcher = min(self._owners[part], key=lambda each: len(self._parts.get(each, ())))
            self._parts.setdefault(watcher, []).append(part)
            if len(self._parts[watcher]) == 1:
                self._ask(watcher, part)

    def hurry(self, limit_s: float) -> None:
        """Leave it only so many seconds more."""
        self.by = min(self.by, time.monotonic() + limit_s)

    def give_up(self, why: str) -> None:
        """Wait no longer."""
        self._parts.clear()
        self.error = self.error or why
