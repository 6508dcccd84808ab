"""What was measured of a block: times and bytes at some numbers of rows, and the cost that follows for a batch.

No torch in this file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from rannd.graph.fx.ir import Size
from rannd.profile.costs import BlockCost
from rannd.profile.kept_values import Memory

STEP = 4
"""Between one measured number of rows and the next, for a line between them."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One block with one number of rows. Microseconds and bytes, see BlockCost."""

    rows: int
    forward_us: float
    backward_us: float
    weight_us: float
    activation_bytes: float


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """One block."""

    points: tuple[Point, ...]
    """With more and more rows."""
    too_many: int = 0
    """With so many rows memory ran out; 0: it never did."""
    kept: tuple[int, ...] = ()
    """Of the values that cross its border those that autograd keeps: places in the order of graph.structure.crossing.
    Their bytes are in `activation_bytes`."""
    add_us: float = 0.0
    """To add gradients of its parameters to others."""

    def joined(self, other: Measured | None) -> Measured:
        """The points of both; where both have one, this one's."""
        if other is None:
            return self
        points = {point.rows: point for point in (*other.points, *self.points)}
        points_of_both = tuple(points[rows] for rows in sorted(points))
        return Measured(points_of_both, self.too_many, self.kept or other.kept, self.add_us or other.add_us)

    @property
    def lasting(self) -> Measured:
        """What may be kept: that memory ran out is no property of the block, something else may have been there."""
        return Measured(self.points, 0, self.kept, self.add_us)

    def cost(self, most: int, crossing: Sequence[int] = ()) -> BlockCost:
        """The cost for pieces of up to `most` rows: a line through the points nearest to `most` and a quarter of it.

        Through one point, proportional to the rows. `crossing`: the graph's values that cross the block's border.
        """
        high = next((point for point in self.points if point.rows >= most), self.points[-1])
        low = _below(self.points, high.rows)
        forward, backward, weight, kept = (
            _line(high.rows, getattr(high, name), *((low.rows, getattr(low, name)) if low is not None else ()))
            for name in ("forward_us", "backward_us", "weight_us", "activation_bytes")
        )
        values = tuple(crossing[place] for place in self.kept if place < len(crossing))
        return BlockCost(forward, backward, kept, weight, max(self.too_many - 1, 0), values, self.add_us)


def middle(found: Sequence[Measured]) -> Measured:
    """Of several measurements of one part, with the same numbers of rows, the median times, of two the shorter.

    The rest is the first one's.
    """
    points = []
    for same in zip(*(each.points for each in found), strict=True):
        times = {
            name: statistics.median_low(getattr(point, name) for point in same)
            for name in ("forward_us", "backward_us", "weight_us")
        }
        points.append(msgspec.structs.replace(same[0], **times))
    adding = statistics.median_low(each.add_us for each in found)
    return msgspec.structs.replace(found[0], points=tuple(points), add_us=adding)


def lacking(known: Measured | None, most: int, *, whole: bool) -> tuple[int, ...]:
    """Numbers of rows, ascending, that have to be measured for pieces of up to `most` rows; () where enough is known.

    `whole`: all pieces have `most` rows.
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
    """Numbers of rows that are enough for pieces of any size up to `most`, ascending. `whole`: as in `lacking`."""
    found = [most]
    while not whole and found[-1] > 1:
        found.append(max(found[-1] // STEP, 1))
    return tuple(reversed(found))


def total(costs: Sequence[BlockCost], memory: Memory) -> BlockCost:
    """The cost of parts of a graph that run one after the other.

    What several of them keep counts once, and a view as the value in whose memory it is.
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
    """Whether these can be measurements: for what comes from a file."""
    numbers = [number for point in measured.points for number in msgspec.structs.astuple(point)[1:]]
    rows = [point.rows for point in measured.points]
    return (
        bool(rows)
        and rows[0] >= 1
        and all(a < b for a, b in pairwise(rows))
        and all(math.isfinite(number) and number >= 0 for number in numbers)
        and all(point.weight_us <= point.backward_us for point in measured.points)
        and measured.too_many >= 0
        and all(place >= 0 for place in measured.kept)
        and math.isfinite(measured.add_us)
        and measured.add_us >= 0
    )


def _below(points: Sequence[Point], rows: int) -> Point | None:
    """The point with most rows of at most half as many."""
    return next((point for point in reversed(points) if 2 * point.rows <= rows), None)


def _line(many: int, more: float, few: int = 0, less: float = 0.0) -> Size:
    """The line through (`few`, `less`) and (`many`, `more`), never falling and never below zero.

    Where it would be below zero for no rows, the parabola through (0, 0) instead: each row then takes longer, because
    caches are full.
    """
    if few == 0:
        return Size(0.0, more / many)
    slope = max((more - less) / (many - few), 0.0)
    if more - slope * many >= 0:
        return Size(more - slope * many, slope)
    bend = (more / many - less / few) / (many - few)
    each = less / few - bend * few
    return Size(0.0, each, bend) if each >= 0 else Size(0.0, 0.0, more / many**2)
