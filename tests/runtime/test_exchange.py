"""Slices of mini-batches, and flags in numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.exchange import pack_flags, split_rows, unpack_flags


@given(st.integers(0, 100), st.integers(1, 20))
def test_slices_cover_the_mini_batch_evenly(rows: int, parts: int) -> None:
    slices = split_rows(rows, parts)
    assert len(slices) == parts
    assert [row for first, count in slices for row in range(first, first + count)] == list(range(rows))
    counts = [count for _, count in slices]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.booleans(), max_size=124))
def test_flags_survive_packing(flags: list[bool]) -> None:
    first, second = pack_flags(flags)
    assert max(first, second) < 2**63
    assert unpack_flags(first, second, len(flags)) == flags


def test_very_many_flags_count_as_set() -> None:
    assert unpack_flags(*pack_flags([False] * 125), 125) == [True] * 125
