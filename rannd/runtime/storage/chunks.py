"""Whether the parts of a tensor cover it exactly: no hole, no overlap."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""A part of a tensor: where it begins and how large it is, in each dimension."""
MOST_DIVIDED = 8
"""Dimensions in which a tensor may be divided."""


def check_cover(shape: Sequence[int], parts: Sequence[Box]) -> None:
    """ValueError where parts, all inside of a tensor of `shape`, leave out an element or have one twice.

    How often an element is in a part is known from the corners alone. Take its differences along each dimension: a part
    gives 1 or -1 at each corner, by the number of its dimensions in which the corner is the end, and 0 elsewhere. Sums
    of such functions are equal exactly where their differences are, so the corners have to add up to those of the
    whole tensor.
    """
    if 0 in shape:
        return
    boxes = [(starts, counts) for starts, counts in parts if 0 not in counts]
    divided = [each for each, n in enumerate(shape) if any(counts[each] != n for _, counts in boxes)]
    if len(divided) > MOST_DIVIDED:
        raise ValueError(f"it is divided in {len(divided)} dimensions, more than {MOST_DIVIDED}")
    corners: Counter[tuple[int, ...]] = Counter()
    for starts, counts, sign in [*((*box, 1) for box in boxes), ([0] * len(shape), shape, -1)]:
        for ends in itertools.product((0, 1), repeat=len(divided)):
            corner = tuple(starts[each] + end * counts[each] for each, end in zip(divided, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise ValueError("its parts leave a hole or overlap")
