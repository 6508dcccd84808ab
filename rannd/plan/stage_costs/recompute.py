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

from bisect import bisect_right

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
    least: tuple[Table, Table] | None = None
    """Bytes per microbatch, and times, if segments that recompute may have any bytes in the backward: with a bound on
    these it takes no less."""
    for bound in bounds:
        most, limit = (budget - bound) / flying, np.inf
        if best is not None:
            limit = best.forward_us
            if least is None:
                kept, time, *_ = _states(forward, activation, handed, most, np.inf, limit, apart)
                least = kept[-1], time[-1]
            within = int(np.searchsorted(least[0], most, side="right"))
            if not within or least[1][within - 1] >= limit:
                continue
        best = _within(forward, activation, handed, most, float(bound), limit, apart) or best
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
    kept, time, origins, firsts = _states(forward, activation, handed, most, bound, limit, apart)
    if not len(kept[count]):
        return None
    place, end = len(kept[count]) - 1, count
    forward_us, size = float(time[count][place]), float(kept[count][place])
    ends: list[int] = []
    flags: list[bool] = []
    working = 0.0
    while end:
        state, again = divmod(int(origins[end][place]), 2)
        start = bisect_right(firsts, state) - 1
        place = state - firsts[start]
        ends.insert(0, end)
        flags.insert(0, bool(again))
        working = max(working, float(activation[start, end]) if again else 0.0)
        end = start
    return DividedStage(tuple(ends), tuple(flags), size, working, forward_us)


def _states(
    forward: Table, activation: Table, handed: Table, most: float, bound: float, limit: float, apart: bool
) -> tuple[list[Table], list[Table], list[npt.NDArray[np.int64]], list[int]]:
    """Return bytes per microbatch, ascending, and times of the states at each border, where they come from, and the
    number of the first one."""
    count = len(forward)
    made = np.concatenate([[0.0], np.cumsum(forward)])
    # [start, end, whether the segment recomputes]: what a segment adds to bytes and time.
    more = handed[..., None] + np.stack([activation, np.zeros_like(activation)], axis=2)
    repeated = np.where(activation > bound, np.inf, made - made[:, None])
    took = np.stack([np.zeros_like(activation), repeated], axis=2)
    kept, time = [np.zeros(1)], [np.zeros(1)]
    """By border, the states that are worth going on from."""
    origins = [np.full(1, -1)]
    """Of each state twice the number of the state before, counted over all borders, and whether the segment between
    recomputes."""
    firsts = [0]
    """Number of the first state of each border."""
    for end in range(1, count + 1):
        first = end - 1 if apart else 0
        starts = np.repeat(np.arange(first, end), [len(each) for each in kept[first:]])
        sizes = (np.concatenate(kept[first:])[:, None] + more[starts, end]).ravel()
        times = (np.concatenate(time[first:])[:, None] + took[starts, end]).ravel()
        order = np.lexsort((times, sizes))
        sizes, times = sizes[order], times[order]
        worth = (sizes <= most) & (times < limit)
        worth[1:] &= times[1:] < np.minimum.accumulate(times)[:-1]
        firsts.append(firsts[-1] + len(kept[-1]))
        origins.append(2 * firsts[first] + order[worth])
        kept.append(sizes[worth])
        time.append(times[worth])
    return kept, time, origins, firsts
