"""When new hosts join an elastic job whose hosts change often.

A restart stops every rank, so hosts that come one after the other had better join together. How long the first of them
waits is the ski rental problem (Karlin, Manasse, Rudolph and Sleator, Competitive snoopy caching, 1988): until the
slot-seconds that new slots were not used are as many as the restart will cost. Then no order of events makes the job
lose more than twice what it had to, and for hosts that come independently of each other the wait is the best one.

Where changes are rare nothing else happens during that wait, and it is lost. So new hosts wait only if the next change
is to be expected before its end: if the mean time between the latest changes is shorter.
"""

from __future__ import annotations

import statistics
from collections import deque

FEW = 6
"""Changes before which nothing is known of their frequency."""
_LATEST = 12
"""Number of the latest changes, and of restarts, that count."""


class Patience:
    """Of one job, over all of its starts. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=_LATEST)
        self._costs: deque[float] = deque(maxlen=_LATEST)
        self._started = False
        self._asked_at: float | None = None
        self._away_since: float | None = None
        self._slots, self._since, self._unused = 0, 0.0, 0.0
        """Slots that wait, the time up to which they were counted, and the slot-seconds until then."""

    @property
    def cost_s(self) -> float | None:
        """Seconds from asking ranks to leave to the first new step, the median; None: not known yet."""
        return statistics.median(self._costs) if self._costs else None

    def change(self, now: float) -> None:
        """Other hosts are named, or one was lost."""
        self._changes.append(now)

    def ask(self, now: float) -> None:
        """The ranks are asked to leave, and the next start follows at once."""
        self._asked_at = now

    def start(self, now: float) -> None:
        """The ranks are started on all hosts that there are. If they were not asked to leave, something has failed."""
        if self._started and self._asked_at is None:
            self.change(now)
        self._started = True
        self._away_since, self._asked_at = self._asked_at, None
        self._slots, self._unused = 0, 0.0

    def step(self, now: float) -> None:
        """The present start has made a step that none had made before."""
        if self._away_since is not None:
            self._costs.append(now - self._away_since)
            self._away_since = None

    def join_at(self, now: float, slots: int, running: int) -> float:
        """Return when `slots` new slots are worth a restart of the `running` ones; `now`: at once.

        Call it whenever the number of new slots changes; 0: they are gone.
        """
        self._unused += self._slots * (now - self._since)
        self._slots, self._since = slots, now
        cost_s = self.cost_s
        if not slots or cost_s is None or len(self._changes) < FEW:
            return now
        mean_s = (now - self._changes[0]) / (len(self._changes) - 1)
        price = cost_s * running  # slot-seconds
        return now if mean_s * slots > price else now + max(0.0, (price - self._unused) / slots)
