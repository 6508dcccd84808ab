"""Slices of mini-batches, and flags in numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.binding.microbatches import split_rows
from rannd.runtime.comm.lockstep import pack_flags, pack_floats, unpack_flags, unpack_floats


@given(st.integers(0, 100), st.integers(1, 20))
def test_slices_cover_the_mini_batch_evenly(rows: int, parts: int) -> None:
    slices = split_rows(rows, parts)
    assert len(slices) == parts
    assert [row for first, count in slices for row in range(first, first + count)] == list(range(rows))
    counts = [count for _, count in slices]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.lists(st.booleans(), max_size=300))
def test_flags_survive_packing(flags: list[bool]) -> None:
    numbers = pack_flags(flags)
    assert max(numbers, default=0) < 2**63
    assert unpack_flags(numbers, len(flags)) == flags


@given(st.lists(st.floats(), max_size=10))
def test_floats_survive_packing(values: list[float]) -> None:
    numbers = pack_floats(values)
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert list(map(str, unpack_floats(numbers))) == list(map(str, values))
