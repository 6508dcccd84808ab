"""Measurements of a block at several row counts, and the cost functions fitted to them.

No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from rannd.graph.fx.ir import Size
from rannd.profile.costs import BlockCost
from rannd.profile.kept_values import Memory

STEP = 4
"""Ratio of neighbouring row counts that are measured for a line between them."""


NOISY = 0.05
"""Spread from which on a time is measured again by the next job that measures anything."""
NOISY_US = 50.0
"""Microseconds that runs have to differ by for that: a clock and the processor's caches alone make some."""
LONGEST_US, LARGEST_BYTES = 1e12, 2.0**46
"""Limits of what can have been measured: eleven days, and 64 TiB of activations on one device."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Measurement of one block at one row count. Microseconds and bytes, see `BlockCost`."""

    rows: int
    forward_us: float
    backward_us: float
    weight_us: float
    activation_bytes: float
    spread: float = 0.0
    """How far apart the measured times were, relative to them: see `rannd.profile.samples`."""

    @property
    def us(self) -> float:
        """Forward and backward."""
        return self.forward_us + self.backward_us

    @property
    def is_noisy(self) -> bool:
        """Whether it should be measured again, as other processes may have spoilt it."""
        return self.spread > NOISY and self.spread * self.us > NOISY_US


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """All measurements of one block."""

    points: tuple[Point, ...]
    """By ascending number of rows."""
    too_many: int = 0
    """Row count with which memory ran out; 0: it never did."""
    kept: tuple[int, ...] = ()
    """Values crossing the block's border that autograd saves, as indices into block_hash.crossing.
    Their bytes are included in `activation_bytes`."""
    add_us: float = 0.0
    """Time to accumulate the block's parameter gradients."""

    def joined(self, other: Measured | None) -> Measured:
        """Merge the points of two measurements; where both have one, this one's is taken, or the less noisy one."""
        if other is None:
            return self
        points = {point.rows: point for point in other.points}
        for point in self.points:
            before = points.get(point.rows)
            if before is None or not point.is_noisy or point.spread <= before.spread:
                points[point.rows] = point
        points_of_both = tuple(points[rows] for rows in sorted(points))
        return Measured(points_of_both, self.too_many, self.kept or other.kept, self.add_us or other.add_us)

    @property
    def lasting(self) -> Measured:
        """The measurement without `too_many`, which must not be stored: it also depends on what else used memory."""
        return Measured(self.points, 0, self.kept, self.add_us)

    @property
    def given(self) -> Measured:
        """The measurement as a user's file gives it: none of its times is measured again for being noisy."""
        return msgspec.structs.replace(
            self, points=tuple(msgspec.structs.replace(point, spread=0.0) for point in self.points)
        )

    def _used(self, most: int) -> tuple[Point | None, Point]:
        """The points between which costs for microbatches of up to `most` rows are: few rows, and many."""
        high = next((point for point in self.points if point.rows >= most), self.points[-1])
        return _below(self.points, high.rows), high

    def noisy(self, most: int) -> tuple[int, ...]:
        """Row counts, ascending, that the cost for microbatches of up to `most` rows uses although they are noisy."""
        return tuple(point.rows for point in self._used(most) if point is not None and point.is_noisy)

    def cost(self, most: int, crossing: Sequence[int] = ()) -> BlockCost:
        """Fit the cost for microbatches of up to `most` rows.

        It is a line through the points nearest to `most` and to a quarter of it; with one point, it is proportional to
        the rows. `crossing`: the graph's values that cross the block's border.
        """
        low, high = self._used(most)
        forward, backward, weight, kept = (
            _line(high.rows, getattr(high, name), *((low.rows, getattr(low, name)) if low is not None else ()))
            for name in ("forward_us", "backward_us", "weight_us", "activation_bytes")
        )
        values = tuple(crossing[place] for place in self.kept if place < len(crossing))
        return BlockCost(forward, backward, kept, weight, max(self.too_many - 1, 0), values, self.add_us)


def lacking(known: Measured | None, most: int, *, whole: bool) -> tuple[int, ...]:
    """Return the row counts, ascending, still to be measured for microbatches of up to `most` rows; () if none.

    `whole`: all microbatches have exactly `most` rows.
    """
    points = known.points if known is not None else ()
    fewest = max(most // STEP, 1)
    if whole or fewest == most:
        return () if any(point.rows == most for point in points) else (most,)
    high = next((point for point in points if point.rows >= most), None)
    if high is None or high.rows >= STEP * most:
        return tuple(rows for rows in (fewest, most) if all(point.rows != rows for point in points))
    low = _below(points, high.rows)
    return () if low is not None and low.rows * STEP**2 >= high.rows else (max(high.rows // STEP, 1),)


def ladder(most: int, *, whole: bool) -> tuple[int, ...]:
    """Return row counts, ascending, that suffice for microbatches of up to `most` rows. `whole`: as in `lacking`."""
    found = [most]
    while not whole and found[-1] > 1:
        found.append(max(found[-1] // STEP, 1))
    return tuple(reversed(found))


def total(costs: Sequence[BlockCost], memory: Memory) -> BlockCost:
    """Sum the costs of parts of a graph that run one after the other.

    Values that several parts save count once, and a view counts as the value whose memory it shares.
    """
    bounds = [cost.most_rows for cost in costs if cost.most_rows]
    kept = [value for cost in costs for value in cost.kept]
    homes = dict.fromkeys(memory.home[value] for value in kept)
    once = sum((cost.activation_bytes for cost in costs), Size())
    for value in kept:
        size = memory.graph.values[value].bytes
        once += Size(-size.c0, -size.c1, -size.c2)
    return BlockCost(
        sum((cost.forward_us for cost in costs), Size()),
        sum((cost.backward_us for cost in costs), Size()),
        sum((memory.bytes_of(home) for home in homes), once),
        sum((cost.weight_us for cost in costs), Size()),
        min(bounds, default=0),
        tuple(homes),
        sum(cost.add_us for cost in costs),
    )


def is_plausible(measured: Measured) -> bool:
    """Whether these can be measurements: validates what was read from a file."""
    times = [measured.add_us, *(each for point in measured.points for each in msgspec.structs.astuple(point)[1:4])]
    rows = [point.rows for point in measured.points]
    return (
        bool(rows)
        and rows[0] >= 1
        and all(a < b for a, b in pairwise(rows))
        and all(0 <= time <= LONGEST_US for time in times)
        and all(
            0 <= point.activation_bytes <= LARGEST_BYTES and 0 <= point.spread <= LONGEST_US
            for point in measured.points
        )
        and all(point.weight_us <= point.backward_us for point in measured.points)
        and measured.too_many >= 0
        and all(place >= 0 for place in measured.kept)
    )


def _below(points: Sequence[Point], rows: int) -> Point | None:
    """Return the point with the most rows among those with at most half of `rows`."""
    return next((point for point in reversed(points) if 2 * point.rows <= rows), None)


def _line(many: int, more: float, few: int = 0, less: float = 0.0) -> Size:
    """Return the line through (`few`, `less`) and (`many`, `more`), clamped to be non-decreasing and non-negative.

    Where it would be negative at 0 rows, the parabola through (0, 0) is used instead: each row then takes longer,
    because caches overflow.
    """
    if few == 0:
        return Size(0.0, more / many)
    slope = max((more - less) / (many - few), 0.0)
    if more - slope * many >= 0:
        return Size(more - slope * many, slope)
    bend = (more / many - less / few) / (many - few)
    each = less / few - bend * few
    return Size(0.0, each, bend) if each >= 0 else Size(0.0, 0.0, more / many**2)
