"""States of pieces, put together, are the state of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannd.runtime.zero.division import Piece
from rannd.runtime.zero.state_pieces import cut, is_part, join


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_pieces_make_the_whole(data: st.DataObject, shape: list[int]) -> None:
    size = torch.Size(shape)
    ends = sorted(data.draw(st.sets(st.integers(1, size.numel()))) | {size.numel()})
    state = {"step": torch.tensor(3.0), "mean": torch.randn(size), "more": [torch.randn(size), 7, ("a", None)]}
    pieces = [Piece(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
    parts = [(piece, cut(state, size, piece)) for piece in pieces]
    for piece, part in parts:
        assert is_part(part["mean"], piece)
        assert not is_part(part["step"], piece)
    found = join(parts[::-1], size)
    assert torch.equal(found["mean"], state["mean"])
    assert torch.equal(found["more"][0], state["more"][0])
    assert found["more"][1:] == state["more"][1:]
    assert found["step"] == 3


def test_a_part_shares_no_memory_with_the_whole() -> None:
    whole = torch.zeros(4)
    cut({"mean": whole}, whole.shape, Piece(0, 2))["mean"].fill_(1)
    assert not whole.any()


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(Piece(0, 2), {"m": torch.zeros(2)})], "do not make up"),
        ([(Piece(0, 2), {"m": torch.zeros(2)}), (Piece(3, 4), {"m": torch.zeros(1)})], "do not make up"),
        ([(Piece(0, 2), {"m": torch.zeros(2)}), (Piece(2, 4), {})], "other entries"),
        ([(Piece(0, 2), {"m": torch.zeros(2)}), (Piece(2, 4), {"m": 1})], "Tensor"),
    ],
)
def test_what_does_not_fit_together_is_an_error(pieces: list[tuple[Piece, object]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        join(pieces, (4,))
