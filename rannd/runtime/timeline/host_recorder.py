"""Records by the host's clock: what ranks on CPUs do, which wait for what they compute."""

from __future__ import annotations

import time
from collections import deque

from rannd.device.timing import HostClock, Moment
from rannd.plan.schedule.program import Action
from rannd.runtime.timeline.event_ring import EventRing
from rannd.runtime.timeline.recorder import COMPUTING, WAITING, Doing, Mark, StepRecorder, StepRow

ROWS = 128
"""Steps whose sums are kept."""
THINNED = 16
"""One in so many is recorded of those that nobody waits for: in short steps recording takes some hundredths of it."""

Event = tuple[Doing, Action | None]


class HostRecorder(StepRecorder):
    """Sums up each step. `full`: also keeps the events of the latest steps."""

    on = True

    def __init__(self, *, full: bool) -> None:
        self._rows: deque[StepRow] = deque(maxlen=ROWS)
        self._row = StepRow(-1, 0)
        self._ring: EventRing[Event] | None = EventRing() if full else None
        self._clock = HostClock()
        self._begun: dict[int, Moment] = {}
        """When what is going on began."""
        self._inside: list[tuple[int, int]] = []
        """Begin, and own nanoseconds, of computations and waits since the last call ended."""
        self._thin = self._skips = False
        """Whether not all steps are recorded, and whether this one is not."""

    def begin(self) -> Mark:
        return self.begin_on_host()

    def end(self, kind: Doing, src: int, dst: int, action: Action | None, begun: Mark) -> None:
        assert type(begun) is int
        self._end(kind, src, dst, action, begun)

    def begin_on_host(self) -> int:
        if self._skips:
            return 0
        now = self._clock.moment()
        self._begun[now.ns] = now
        return now.ns

    def end_on_host(self, kind: Doing, begun: int) -> None:
        end = self._end(kind, -1, -1, None, begun)
        if kind is Doing.AGREE:
            self._row.agreed_ns = end

    def _end(self, kind: Doing, src: int, dst: int, action: Action | None, begun: int) -> int:
        """Record what ends now, and how long of it the thread waited for a processor; returns the moment."""
        if self._skips:
            return 0
        now = self._clock.moment()
        before = self._begun.pop(begun, None)
        end = now.ns
        self._add(self._row, kind, src, dst, action, begun, end)
        own_ns = end - begun
        if before is not None:
            waits = self._row.delays.setdefault((kind, src), [0, 0])
            for number in range(2):
                waited_ns = int(1e3 * (now[1 + number] - before[1 + number]))
                waits[number] += waited_ns
                own_ns -= waited_ns
        if kind is Doing.CALL:
            self._row.host_ns += max(own_ns - sum(ns for begin, ns in self._inside if begin >= begun), 0)
            self._inside.clear()
        elif kind in WAITING or kind in COMPUTING:
            self._inside.append((begun, own_ns))
        return end

    def _add(self, row: StepRow, kind: Doing, src: int, dst: int, action: Action | None, begin: int, end: int) -> None:
        place = kind, src, dst
        found = row.sums.get(place)
        if found is None:
            row.sums[place] = [1, end - begin]
            if kind is Doing.SEND or kind is Doing.RECEIVE:
                row.firsts[place] = end
        else:
            found[0] += 1
            found[1] += end - begin
        if self._ring is not None and kind is not Doing.CALL:
            self._ring.add(row.begin_ns, (kind, action), begin, end)
            row.events += 1

    def begin_step(self, number: int) -> None:
        now = time.perf_counter_ns()
        self._row.end_ns = now
        self._begun.clear()  # of what an error has ended
        self._inside.clear()
        self._row = StepRow(number, now)
        self._skips = self._thin and number % THINNED != 0

    def forget(self) -> None:
        self._rows.clear()
        self._thin = False

    def thin_out(self) -> None:
        self._thin = self._ring is None

    def count_step(self) -> None:
        if self._skips:
            return
        self._row.counted = True
        self._rows.append(self._row)

    def rows(self) -> list[StepRow]:
        return [row for row in self._rows if row.counted and row.end_ns and not row.pending]

    def events(self, number: int) -> list[tuple[Doing, Action | None, int, int]]:
        row = next((row for row in reversed(self._rows) if row.number == number), None)
        if self._ring is None or row is None:
            return []
        found = [(kind, action, begin, end) for (kind, action), begin, end in self._ring.of_step(row.begin_ns)]
        return found if len(found) == row.events else []
