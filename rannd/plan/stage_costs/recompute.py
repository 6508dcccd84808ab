"""Which blocks of a stage recompute their activations: the least time that fits the memory.

A stage is divided into segments, runs of blocks. A segment that recomputes keeps nothing but the values that enter it;
in the backward it has its activations once, for one microbatch. All others keep their activations for each microbatch
in flight. Values that one segment hands to later ones are kept once, by the segment that makes them.

For a bound on the activations that a segment may have in the backward, the least time is found by dynamic programming
over the borders of segments, with all pairs of (bytes per microbatch, time) of which none is better in both. All bounds
that make a difference are tried.

Source: the recurrence of Herrmann et al., "Optimal checkpointing for heterogeneous chains" (2019), with segments that
recompute once and microbatches in flight.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]

MOST_BOUNDS = 32
"""Maximum number of bounds to try; of more, some in between are left out."""


class DividedStage(msgspec.Struct, frozen=True):
    """DividedStage of a stage. Bytes and microseconds."""

    ends: tuple[int, ...]
    """Blocks of the stage before the end of each segment."""
    again: tuple[bool, ...]
    """Whether each of them recomputes."""
    kept: float
    """Kept per microbatch: activations, and values between segments."""
    working: float
    """Activations of the largest segment that recomputes."""
    forward_us: float
    """Time of the repeated forwards of a microbatch."""
    away: float = 0.0
    """What segments start from and is elsewhere between forward and backward, per microbatch."""

    def bytes(self, flying: int) -> float:
        """Bytes with `flying` microbatches between forward and backward."""
        return self.kept * flying + self.working


def segments(
    forward: Table, activation: Table, handed: Table, flying: int, budget: float, *, apart: bool = False
) -> DividedStage | None:
    """Return the segments with the least repeated time whose bytes are within `budget`; None if there are none.

    Args:
        forward: ``[block]``: time of its forward.
        activation: ``[i, j]``: bytes kept by blocks i to j - 1 from forward to backward.
        handed: ``[i, j]``: bytes of the values that blocks i to j - 1 make and later blocks of the stage read.
        flying: Microbatches between forward and backward.
        budget: Bytes.
        apart: Each block is a segment.
    """
    count = len(forward)
    runs = activation[np.triu_indices(count + 1, 1)]
    bounds = np.unique(np.concatenate([[0.0], runs[runs <= budget]]))
    if len(bounds) > MOST_BOUNDS:
        bounds = bounds[np.linspace(0, len(bounds) - 1, MOST_BOUNDS).round().astype(int)]
    best: DividedStage | None = None
    for bound in bounds:
        limit = np.inf if best is None else best.forward_us
        best = _within(forward, activation, handed, (budget - bound) / flying, float(bound), limit, apart) or best
    return best


def least_memory(forward: Table, activation: Table, handed: Table, flying: int, *, apart: bool = False) -> DividedStage:
    """Return the segments, all of which recompute, with the least bytes: each block apart, or all together.

    `apart`: each block has to be a segment.
    """
    count = len(forward)
    alone = DividedStage(
        tuple(range(1, count + 1)),
        (True,) * count,
        float(sum(handed[at, at + 1] for at in range(count))),
        float(max(activation[at, at + 1] for at in range(count))),
        float(forward.sum()),
    )
    if apart:
        return alone
    together = DividedStage((count,), (True,), 0.0, float(activation[0, count]), float(forward.sum()))
    return min(alone, together, key=lambda each: (each.bytes(flying), len(each.ends)))


def _within(
    forward: Table, activation: Table, handed: Table, most: float, bound: float, limit: float, apart: bool
) -> DividedStage | None:
    """The least time with at most `most` bytes per microbatch, and `bound` bytes in each segment that recomputes.

    None if it is not below `limit`.
    """
    count = len(forward)
    made = np.concatenate([[0.0], np.cumsum(forward)])
    kept, time = [np.zeros(1)], [np.zeros(1)]
    """By border, the states that are worth going on from."""
    origins = [np.full((1, 3), -1)]
    """Of each state the border and state before, and whether the segment between recomputes."""
    for end in range(1, count + 1):
        parts: list[tuple[Table, Table, npt.NDArray[np.int64]]] = []
        for start in range(end - 1 if apart else 0, end):
            places = np.arange(len(kept[start]))
            for again in (0, 1):
                if again and activation[start, end] > bound:
                    continue
                more = handed[start, end] + (0.0 if again else activation[start, end])
                took = made[end] - made[start] if again else 0.0
                origin = np.stack([np.full_like(places, start), places, np.full_like(places, again)], axis=1)
                parts.append((kept[start] + more, time[start] + took, origin))
        sizes, times, before = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.lexsort((times, sizes))
        sizes, times, before = sizes[order], times[order], before[order]
        lowest = np.minimum.accumulate(times)
        worth = (sizes <= most) & (times < limit) & (np.concatenate([[True], times[1:] < lowest[:-1]]))
        kept.append(sizes[worth])
        time.append(times[worth])
        origins.append(before[worth])
    if not len(kept[count]):
        return None
    place, end = len(kept[count]) - 1, count
    forward_us, size = float(time[count][place]), float(kept[count][place])
    ends: list[int] = []
    flags: list[bool] = []
    working = 0.0
    while end:
        start, place, again = (int(each) for each in origins[end][place])
        ends.insert(0, end)
        flags.insert(0, bool(again))
        working = max(working, float(activation[start, end]) if again else 0.0)
        end = start
    return DividedStage(tuple(ends), tuple(flags), size, working, forward_us)
