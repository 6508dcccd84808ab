"""Ranges of flattened tensors as boxes, which is how checkpoints describe parts of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one of each per dimension."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `start` to `stop` of a tensor flattened in row-major order, in this order.

    Each box is contiguous there; there are at most two for each dimension but the last, and one more.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    low, high = -(-start // inner), stop // inner
    if low > high:  # inside of one row
        yield from _in_row(shape, low - 1, start, stop, inner)
        return
    yield from _in_row(shape, low - 1, start, low * inner, inner)
    if low < high:
        yield (low, *(0 for _ in shape[1:])), (high - low, *shape[1:])
    yield from _in_row(shape, high, high * inner, stop, inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int, inner: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start - row * inner, stop - row * inner):
        yield (row, *offsets), (1, *sizes)
