"""Parts of a tensor are accepted exactly where each element is in one of them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.storage.chunks import MOST_DIVIDED, Box, check_cover

SHAPES = st.lists(st.integers(0, 4), max_size=3)


def exact(shape: list[int], boxes: list[Box]) -> bool:
    """By counting how often each element is in a part."""
    count = np.zeros(shape, dtype=int)
    for starts, counts in boxes:
        count[tuple(slice(start, start + n) for start, n in zip(starts, counts, strict=True))] += 1
    return bool((count == 1).all())


def accepted(shape: list[int], boxes: list[Box]) -> bool:
    try:
        check_cover(shape, boxes)
    except ValueError:
        return False
    return True


@st.composite
def divided(draw: st.DrawFn, shape: list[int]) -> list[Box]:
    """A tensor cut again and again: parts that cover it, also empty ones."""
    boxes: list[Box] = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        starts, counts = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        along = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, counts[along]))
        first, second = list(counts), list(counts)
        first[along], second[along] = at, counts[along] - at
        later = list(starts)
        later[along] += at
        boxes += [(starts, first), (later, second)]
    return boxes


@st.composite
def boxes_of(draw: st.DrawFn, shape: list[int]) -> list[Box]:
    boxes = draw(divided(shape))
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.integers(0, 2)) if boxes else 2:
            case 0:
                del boxes[draw(st.integers(0, len(boxes) - 1))]
            case 1:
                boxes.append(draw(st.sampled_from(boxes)))
            case _:
                starts = [draw(st.integers(0, n)) for n in shape]
                counts = [draw(st.integers(0, n - start)) for start, n in zip(starts, shape, strict=True)]
                boxes.append((starts, counts))
    return boxes


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), divided(shape))))
def test_what_was_cut_out_of_a_tensor_covers_it(case: tuple[list[int], list[Box]]) -> None:
    check_cover(*case)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape))))
def test_parts_with_a_hole_or_an_overlap_do_not(case: tuple[list[int], list[Box]]) -> None:
    assert accepted(*case) == exact(*case)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ([4, 2], []),
        ([], []),
        ([], [([], []), ([], [])]),
        ([4], [([0], [2]), ([0], [2])]),  # as large as the tensor
        ([2, 2], [([0, 0], [1, 1]), ([1, 1], [1, 1])]),
        ([2, 2], [([0, 0], [1, 2]), ([0, 0], [1, 2])]),
    ],
)
def test_parts_that_do_not_cover(shape: list[int], boxes: list[Box]) -> None:
    with pytest.raises(ValueError, match="a hole or overlap"):
        check_cover(shape, boxes)


def test_a_tensor_without_elements_needs_no_parts() -> None:
    check_cover([3, 0], [])
    check_cover([3, 0], [([0, 0], [2, 0]), ([2, 0], [1, 0])])


def test_many_parts_and_dimensions_take_little_time() -> None:
    begin = time.process_time()
    side = 100
    cells: list[Box] = [(each, (1, 1)) for each in itertools.product(range(side), repeat=2)]
    check_cover([side, side], cells)
    many = MOST_DIVIDED + 1
    with pytest.raises(ValueError, match=f"divided in {many} dimensions, more than {MOST_DIVIDED}"):
        check_cover([2] * many, [([0] * many, [1] * many)])
    check_cover([2] * 64, [([0] * 64, [2] * 64)])
    assert time.process_time() - begin < 30
