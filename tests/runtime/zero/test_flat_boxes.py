"""Boxes of a range are exactly its elements, in their order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.zero.flat_boxes import boxes


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_boxes_are_the_range(data: st.DataObject, shape: list[int]) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = []
    listed = list(boxes(shape, start, stop))
    for offsets, sizes in listed:
        assert 0 not in sizes
        part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        assert tuple(part.shape) == sizes
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(listed) <= 2 * len(shape) - 1
    assert len({offsets for offsets, _ in listed}) == len(listed)


def test_whole_tensors_are_one_box() -> None:
    assert list(boxes([3, 4], 0, 12)) == [((0, 0), (3, 4))]
    assert list(boxes([], 0, 1)) == [((), ())]
    assert list(boxes([3, 0], 0, 0)) == []
