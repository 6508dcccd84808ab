"""Slices of mini-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.exchange import split_rows


@given(st.integers(0, 100), st.integers(1, 20))
def test_slices_cover_the_mini_batch_evenly(rows: int, parts: int) -> None:
    slices = split_rows(rows, parts)
    assert len(slices) == parts
    assert [row for first, count in slices for row in range(first, first + count)] == list(range(rows))
    counts = [count for _, count in slices]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
