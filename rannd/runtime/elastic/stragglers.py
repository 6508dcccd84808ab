"""Finds hosts that compute slower than the others do: what their ranks' actions take, beside what the plan says.

Every rank tells its ratio of both with what the ranks tell each other between steps anyway. Rank 0 alone compares them,
by its own clock and configuration, so that no rank waits for a comparison::

    step      1 .. 20 ...      ... 40 ...        at least 20 steps and 10 seconds each
    rank 0      compares: c?     compares: c!    twice in a row: a warning, and a note to rannc-run
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rannd import log
from rannd.device.action_clock import ActionClock
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import device_bytes
from rannd.ranks import rank_notes
from rannd.runtime.comm.world import World

STEPS, SECONDS = 20, 10.0
"""Minimum of steps, and of seconds, between two comparisons."""
_MOST_STEPS = 100
"""Steps that count in a comparison: the latest ones."""
_UNIT = 1000
"""A ratio of 1, as ranks tell it."""
_OFF = -1
"""What rank 0 tells if nothing is compared."""


class Stragglers:
    """Compares the ranks of a training.

    Args:
        world: The ranks.
        factor: How many times as long as the others a host computes that is slow; 0: it is not looked for. Rank 0's
            counts.
        bounds: Returns the `least` and `most` of `RowShares`; None: shares are to be even.
        balanced: Time of each rank for the same rows, in percent, by which rows are divided now; None: evenly.
    """

    def __init__(
        self,
        world: World,
        factor: float,
        bounds: Callable[[], tuple[int, int] | None] = lambda: None,
        balanced: Sequence[int] | None = None,
    ) -> None:
        self._world, self._factor, self._bounds = world, factor, bounds
        nodes = [world.slots[world.rank_of_slot.index(rank)].node for rank in range(world.size)]
        self._ranks_of = {node: [rank for rank, each in enumerate(nodes) if each == node] for node in nodes}
        self._on = factor > 0 and len(self._ranks_of) > 1 and rank_notes.heard()
        self._steps: deque[list[tuple[int, int]]] = deque(maxlen=_MOST_STEPS)
        """What the ranks told in the latest steps."""
        self._count = 0
        """Steps since the last comparison."""
        self._since = time.monotonic()
        self._suspects: set[int] = set()
        """Nodes that were slow in the last comparison."""
        self._reported: set[int] = set()
        self._relieved = {node for node, ranks in self._ranks_of.items() if balanced and balanced[ranks[0]] > 100}
        """Nodes whose ranks have fewer rows, as they were slow in earlier starts."""
        self._recovered: set[int] = set()
        """Those that were not slow in the last comparison."""

    def close(self) -> None:
        """Measure no more."""
        self._world.clock = None

    def ratios(self) -> tuple[int, int]:
        """What this rank tells of the last step, in thousandths; 0: it has measured nothing.

        Measured by planned time; and the same if times grow with rows, as shares differ by a row.
        """
        if self._world.rank == 0 and not self._on:
            return _OFF, _OFF
        done = self._world.clock.take() if self._world.clock is not None else None
        if done is None or not done.planned_us or not done.scaled_us:
            return 0, 0
        by_plan, by_rows = done.measured_us / done.planned_us, done.measured_us / done.scaled_us
        return round(_UNIT * by_plan), round(_UNIT * by_rows)

    def take(self, told: Sequence[tuple[int, int]]) -> None:
        """Take what all ranks told of a step."""
        if told[0][0] == _OFF:
            return
        if self._world.clock is None:  # the first step, which compiles and allocates, is not measured
            self._world.clock = ActionClock(self._world.device)
        if self._world.rank:
            return
        self._steps.append(list(told))
        self._count += 1
        if self._count >= STEPS and time.monotonic() - self._since >= SECONDS:
            self._compare()
            self._steps.clear()
            self._count, self._since = 0, time.monotonic()

    def _compare(self) -> None:
        """Report the hosts that are slow now and were so before."""
        views = [self._of_hosts(view) for view in (0, 1)]
        found = slow_hosts(views, self._factor)
        usual = statistics.median_low(views[1].values()) if views[1] else 0.0
        by_rows = {node: ratio / usual for node, ratio in views[1].items()} if usual else {}
        for node in sorted(found.keys() & self._suspects - self._reported):
            first, others = self._ranks_of[node][0], [each for other, each in views[0].items() if other != node]
            log.get("RaNNCModule").warning(
                "host %s computes %.2f times as long as planned, the others %.2f times (straggler_factor = %g)",
                self._world.hosts[first],
                views[0][node],
                statistics.median_low(others),
                self._factor,
            )
            self._tell(first, found[node] if self._bounds() is None else by_rows[node])
            self._reported.add(node)
        self._suspects = set(found)
        fine = {node for node in self._relieved & by_rows.keys() if by_rows[node] < (1 + self._factor) / 2}
        for node in sorted(fine & self._recovered):
            self._tell(self._ranks_of[node][0], 1.0)
        self._relieved -= fine & self._recovered
        self._recovered = fine

    def _tell(self, rank: int, factor: float) -> None:
        least, most = self._bounds() or (0, 0)
        fields = {rank_notes.SLOW: rank, rank_notes.SLOW_PERCENT: round(100 * factor)}
        rank_notes.tell(**fields, **{rank_notes.LEAST_ROWS: least, rank_notes.MOST_ROWS: most})

    def _of_hosts(self, view: int) -> dict[int, float]:
        """Ratio of each node: the median of its ranks, each the median of its steps."""
        found = {}
        for node, ranks in self._ranks_of.items():
            steps = [[step[rank][view] for step in self._steps if step[rank][view]] for rank in ranks]
            if medians := [statistics.median(each) for each in steps if each]:
                found[node] = statistics.median(medians) / _UNIT
        return found


def row_bounds(deployment: Deployment, usable: int) -> tuple[int, int] | None:
    """Return the `least` and `most` of `RowShares`; None: what a rank computes does not depend on its rows.

    With several stages, the replicas of each take the microbatches of all ranks in turns.

    Args:
        deployment: That of the ranks.
        usable: Bytes of each device that a plan may use. Memory grows at most as rows do.
    """
    if len(deployment.stages) > 1:
        return None
    return deployment.microbatches, 100 * usable // max(1, *device_bytes(deployment).values())


def slow_hosts(views: Sequence[Mapping[int, float]], factor: float) -> dict[int, float]:
    """Return the hosts that are slower than the others, and how many times.

    They are compared with the median of all hosts (the lower one of two: of two hosts the faster), not with the plan:
    if it is wrong everywhere, nobody is slow.

    Args:
        views: Ratio of measured and planned time by host, in several ways; a host is slow that is so in each of them.
        factor: How many times as long as the others a slow host takes at least.
    """
    slow: list[dict[int, float]] = []
    for ratios in views:
        usual = statistics.median_low(ratios.values()) if ratios else 0.0
        slow.append({host: ratio / usual for host, ratio in ratios.items() if usual and ratio > factor * usual})
    everywhere = set.intersection(*(set(each) for each in slow))
    return {host: min(each[host] for each in slow) for host in everywhere}
