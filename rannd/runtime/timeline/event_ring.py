"""The latest events of a rank, in a ring of fixed size: four stores into memory that is there, per event."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

SIZE = 1 << 16
"""Events: 2 MiB, and the steps of some seconds."""

T = TypeVar("T")


class EventRing(Generic[T]):
    """Holds the latest events, of any steps.

    `step`: a number that no other step has. `what`: any value that says what an event is; it is held by reference.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._at = 0
        self._steps, self._begins, self._ends = (array("q", bytes(8 * size)) for _ in range(3))
        self._what: list[T | None] = [None] * size

    def add(self, step: int, what: T, begin_ns: int, end_ns: int) -> None:
        """Put an event in the place of the oldest one."""
        at = self._at
        self._steps[at], self._begins[at], self._ends[at], self._what[at] = step, begin_ns, end_ns, what
        self._at = at + 1 if at + 1 < self._size else 0

    def of_step(self, step: int) -> list[tuple[T, int, int]]:
        """Return what the ring has of a step: what, begin and end."""
        found = []
        for place in range(self._size):
            what = self._what[place]
            if what is not None and self._steps[place] == step:
                found.append((what, self._begins[place], self._ends[place]))
        return found
