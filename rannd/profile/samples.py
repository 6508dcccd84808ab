"""Times of repeated runs of a part, and what counts of them.

Other processes of a machine only make a run longer, and come and go. So it is neither the median that counts, of which
half may be disturbed, nor the quickest run, which may have found its data in caches. Runs come in turns that are spread
over time: of each turn the lower quartile counts, and of all turns the two quickest. If these two agree, nothing
disturbed them; how far they are apart is kept with the time, and what may be spoilt is measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from rannd.device.timing import Sample
from rannd.profile.points import Measured, Point

QUARTILE = 0.25
"""Fraction of the runs of a turn that are at most as long as the one that counts."""
FEWEST = 3
"""Minimum of undisturbed runs of a turn: with fewer it is disturbed as a whole, and all of them count."""
UNCERTAIN = 1.0
"""Spread of a time of which too few turns were undisturbed."""
LEAST_DELAYED = 0.01
"""Part of a backward that can be delayed at least where anything can."""


class RowSamples(msgspec.Struct, frozen=True, array_like=True):
    """Runs of a part with one number of rows."""

    forward: tuple[Sample, ...]
    backward: tuple[Sample, ...] = ()
    first_half: tuple[Sample, ...] = ()
    """Backwards that leave what can be delayed; empty: nothing can be."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Runs of a part in one turn, by number of rows, on one rank or several."""

    rows: dict[int, RowSamples]
    adding: tuple[Sample, ...] = ()
    """Accumulations of the gradients of its parameters."""
    seconds: float = 0.0
    """How long the turn took, all inclusive; the longest of several ranks."""

    def and_those(self, others: Sequence[Turn]) -> Turn:
        """Join the runs of other ranks in the same turn."""
        every = [self, *others]
        rows = {
            count: RowSamples(
                *(
                    tuple(chain.from_iterable(getattr(each.rows[count], name) for each in every if count in each.rows))
                    for name in ("forward", "backward", "first_half")
                )
            )
            for count in dict.fromkeys(count for each in every for count in each.rows)
        }
        adding = tuple(chain.from_iterable(each.adding for each in every))
        return Turn(rows, adding, max(each.seconds for each in every))


def typical(turns: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """Return the time that counts of the runs of several turns, in microseconds, and its spread.

    The spread is how far the two quickest turns are apart, relative to the time; of a single turn, its two quickest
    runs. It is at least `UNCERTAIN` if fewer than two were undisturbed. (0, 0) without any run.
    """
    found = [_of_turn(samples) for samples in turns if samples]
    if len(found) == 1:
        found = [(sample.us, sample.disturbed) for samples in turns for sample in samples]
    calm = sorted(us for us, disturbed in found if not disturbed)
    enough = len(calm) >= min(2, len(found))
    times = calm if enough else sorted(us for us, _ in found)
    if not times or not times[0]:
        return 0.0, 0.0
    first, second = times[0], times[min(1, len(times) - 1)]
    us = (first + second) / 2
    spread = (second - first) / us
    return us, spread if enough else max(spread, UNCERTAIN)


def _of_turn(samples: Sequence[Sample]) -> tuple[float, bool]:
    """Return the time of a turn, and whether it was disturbed."""
    calm = [sample.us for sample in samples if not sample.disturbed]
    enough = len(calm) >= min(FEWEST, len(samples))
    times = sorted(calm if enough else [sample.us for sample in samples])
    return times[int(QUARTILE * (len(times) - 1))], not enough


def counted(first: Measured, turns: Sequence[Turn]) -> Measured:
    """Return a measurement with the times of its turns.

    Args:
        first: What was found before: bytes, and numbers of rows.
        turns: All turns of the part. Points without any keep their times, which are uncertain.
    """
    points = tuple(
        _point(point, [each.rows[point.rows] for each in turns if point.rows in each.rows]) for point in first.points
    )
    return msgspec.structs.replace(first, points=points, add_us=typical([each.adding for each in turns])[0])


def _point(point: Point, turns: Sequence[RowSamples]) -> Point:
    if not turns:
        return msgspec.structs.replace(point, spread=UNCERTAIN)
    forward, forwards = typical([each.forward for each in turns])
    backward, backwards = typical([each.backward for each in turns])
    weight = 0.0
    if turns[0].first_half:
        # Of a small part noise can leave less than nothing; that there is something to delay is known all the same.
        first_half, _ = typical([each.first_half for each in turns])
        weight = max(backward - first_half, LEAST_DELAYED * backward)
    spread = (forwards * forward + backwards * backward) / max(forward + backward, 1e-3)
    return Point(point.rows, forward, backward, weight, point.activation_bytes, spread)
