"""Simplified graphs compute what the model does, forward and backward, with less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pieces import eager, graph_of, in_pieces, signature_of
from torch import Tensor, nn

from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph

VOCABULARY = 12


class Head(nn.Module):
    """A head on hidden states, whose result `use` takes."""

    def __init__(self, use: Callable[..., Any], width: int = VOCABULARY) -> None:
        super().__init__()
        self.use = use
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, width, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.use(self.head(torch.tanh(self.layer(x))), labels)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def count(graph: ModelGraph, name: str) -> int:
    return sum(operator_name(node.target) == f"aten::{name}" for node in graph.traced.graph.nodes)


def head_rows(graph: ModelGraph) -> list[Any]:
    """Positions that each linear of the head's width computes."""
    linears = [node for node in graph.traced.graph.nodes if operator_name(node.target) == "aten::linear"]
    return [node.meta["val"].shape[1] for node in linears if node.meta["val"].shape[-1] == VOCABULARY]


def same(model: nn.Module, x: Tensor, labels: Tensor) -> ModelGraph:
    """The graph of a call, whole and in pieces equal to the model."""
    model = model.double()
    graph = graph_of(model, x, labels)
    _, tensors = signature_of(model, x, labels)
    expected = eager(graph, model, tensors)
    for sizes in ([4], [1, 3]):
        torch.testing.assert_close(in_pieces(graph, model, tensors, sizes), expected, rtol=1e-9, atol=1e-12)
    return graph


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 5, 6, dtype=torch.float64), torch.randint(VOCABULARY, (4, 5))


def test_slices_of_all_of_a_dimension_are_no_operators(batch: tuple[Tensor, Tensor]) -> None:
    def use(hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        hidden[:].mul_(2)  # the same memory
        return hidden[:, 1:], hidden[:], hidden[:, :, None]

    assert count(same(Head(use), *batch), "slice.Tensor") == 1


def test_positions_that_a_loss_drops_are_not_computed(batch: tuple[Tensor, Tensor]) -> None:
    assert head_rows(same(Head(loss), *batch)) == [4]
    assert head_rows(same(Head(lambda logits, labels: logits[:, -2:, :].square().mean()), *batch)) == [2]
    assert head_rows(same(Head(lambda logits, labels: logits[:, ::2].add_(1).square().mean()), *batch)) == [3]


@pytest.mark.parametrize(
    "use",
    [
        lambda logits, labels: (loss(logits, labels), logits),  # read by others
        lambda logits, labels: logits[:, :, :-1].square().mean(),  # of its own columns
        lambda logits, labels: logits[: len(logits)].square().mean(),  # of samples
        lambda logits, labels: logits[:, 1:].as_strided((2, 2), (1, 1)).square().mean() + logits.mean(),
    ],
)
def test_others_are_left_alone(use: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> None:
    graph = graph_of(Head(use).double(), *batch)
    assert head_rows(graph) in ([5], [])


def test_a_head_that_shortens_its_rows_stays(batch: tuple[Tensor, Tensor]) -> None:
    graph = same(Head(lambda logits, labels: logits[:, 1:].square().mean(), width=3), *batch)
    values = [node.meta["val"] for node in graph.traced.graph.nodes if operator_name(node.target) == "aten::linear"]
    assert [value.shape[1:] for value in values] == [(5, 6), (5, 3)]


def test_what_is_written_between_linear_and_slice_counts_for_neither(batch: tuple[Tensor, Tensor]) -> None:
    class Model(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            hidden = self.layer(x)
            logits = self.head(hidden.detach())
            hidden.mul_(3)
            return logits[:, 1:].square().mean() + hidden.square().mean()

    model = Model(loss)
    model.head.requires_grad_(False)  # otherwise autograd minds
    assert 4 in head_rows(same(model, *batch))


def test_lengths_may_change(batch: tuple[Tensor, Tensor]) -> None:
    model = Head(loss).double()
    x, labels = batch
    for length in (5, 3, 2):
        same(model, x[:, :length], labels[:, :length])
