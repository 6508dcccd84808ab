"""Slices of mini-batches, flags in numbers, and ranks that are at different places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannd.errors import StepError
from rannd.runtime.binding.microbatches import split_rows
from rannd.runtime.comm.lockstep import Agreement, Phase, pack_flags, pack_floats, unpack_flags, unpack_floats


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


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (Phase.OPTIMIZER_STATE_DICT, Phase.FORWARD, "rank 0 is in optimizer.state_dict, rank 1 in the forward of call"),
        (Phase.FORWARD, Phase.STATE_DICT, "likewise state_dict: call it on all ranks, outside of `if rank == 0`, and"),
        (Phase.OPTIMIZER_STATE_DICT, Phase.CLIP, "`if rank == 0`, and save what it returns on rank 0 alone"),
        (Phase.SAVE_CHECKPOINT, Phase.FORWARD, "likewise save_checkpoint: call it on all ranks, outside of"),
        (Phase.FORWARD, Phase.BACKWARD, "likewise all other collective functions"),
        (Phase.FORWARD, 99, "likewise all other collective functions"),
    ],
)
def test_ranks_at_different_places_are_told_what_to_call_on_all(here: int, there: int, text: str) -> None:
    world: Any = SimpleNamespace()
    told: Any = SimpleNamespace(finish=lambda: [[here, 2, 0, 0], [there, 2, 0, 0]])
    with pytest.raises(StepError) as caught:
        Agreement(world, [], told).finish()
    assert text in str(caught.value)
