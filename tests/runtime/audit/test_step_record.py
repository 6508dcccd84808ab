"""Copies of a step's values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.fx import Graph

from rannd.runtime.audit.step_record import StepRecord
from rannd.runtime.zero.division import Piece
from rannd.runtime.zero.tensor_piece import TensorPiece


def record(graph: Graph) -> StepRecord:
    held: Any = SimpleNamespace(
        tensors={"own": torch.ones(2), "other": torch.zeros(0)}, own=["own"], sharded={"divided"}
    )
    return StepRecord(graph, cast(Any, held))


def test_what_is_kept_does_not_change_with_the_value() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    kept = record(graph)
    value = torch.arange(6.0).view(2, 3).t()
    kept.values(0, 5, made={x: value, y: None})
    value.zero_()
    found = kept.find(("made", 0, 5))
    assert found.keys() == {kept.label[x]}
    assert torch.equal(found[kept.label[x]], torch.arange(6.0).view(2, 3).t())
    assert found[kept.label[x]].is_contiguous()
    assert kept.find(("made", 0, 6)) == {}
    assert ("made", 0, 5) in kept


def test_a_piece_of_a_gradient_says_which_it_is() -> None:
    kept = record(Graph())
    kept.gradients("reduced", {"w": TensorPiece(torch.ones(3), Piece(2, 5), (4, 2)), "v": None})
    assert torch.equal(kept.find(("reduced", "w"))[""], torch.ones(3))
    assert kept.find(("piece", "w"))[""].tolist() == [2, 5]
    assert kept.find(("reduced", "v")) == {}


def test_a_tensor_is_the_users_or_one_that_was_lent() -> None:
    kept = record(Graph())
    lent = torch.full((2,), 3.0)
    kept.uses(["other", "divided"], [lent, lent])
    assert torch.equal(kept.find(("tensor", "own"))[""], torch.ones(2))
    assert torch.equal(kept.find(("tensor", "other"))[""], lent)
    assert kept.used.keys() == {"other"}
