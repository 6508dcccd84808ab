"""Branches on tensors: those that the call and constants decide are part of the graph, and of what it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pieces import assert_same, eager, graph_of, in_pieces, signature_of
from torch import Tensor, nn

from rannd.errors import TraceError
from rannd.graph.branches import concrete_values
from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph
from rannd.graph.tracing.frontend import trace

WIDTH = 6

pytestmark = pytest.mark.usefixtures("double")


class Branching(nn.Module):
    """One layer or another, as a function of the mask says; the branch is in a module of its own."""

    def __init__(self, condition: Callable[[Branching, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.condition = condition
        self.before, self.yes, self.no = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("limit", torch.tensor(3))
        self.plain = torch.tensor([1, 2])

    def forward(self, a: Tensor, mask: Tensor) -> Tensor:
        a = self.before(a)
        return self.yes(a) if self.condition(self, a, mask) else self.no(a)


def masks(rows: int, last: int) -> Tensor:
    """Zeros, but for the last row."""
    found = torch.zeros(rows, 2, dtype=torch.int64)
    found[-1, 1] = last
    return found


def names(graph: ModelGraph) -> list[str]:
    return [operator_name(node.target) for node in graph.traced.graph.nodes if node.op == "call_function"]


def check(model: nn.Module, graph: ModelGraph, mask: Callable[[int], Tensor]) -> None:
    """The graph computes what the model computes, for all sizes of batches that decide like it, also in pieces."""
    assert graph.traced.leaf_paths == ()
    for rows in (4, 1, 3, 6):
        given = [torch.randn(rows, WIDTH, requires_grad=True), mask(rows)]
        kept = given[1].clone()
        assert graph.traced.decisions is None or graph.traced.decisions.hold(given)
        expected = eager(graph, model, given)
        assert_same(in_pieces(graph, model, given, [rows]), expected)
        if rows > 1 and graph.coupled is None:
            assert_same(in_pieces(graph, model, given, [1, rows - 1]), expected)
        assert torch.equal(given[1], kept)


CONSTANT = [
    lambda m, a, x: (torch.ones(3) == 1).all(),
    lambda m, a, x: torch.triu(torch.full((3, 3), float("-inf")), diagonal=1)[0, 1].isinf(),
    lambda m, a, x: torch.tensor([0, 1]).any().item(),
    lambda m, a, x: int(torch.arange(3).eq(2).any()),
    lambda m, a, x: m.plain.sum() == 3,
    lambda m, a, x: torch.is_nonzero(torch.zeros(1)),
]


@pytest.mark.parametrize("condition", CONSTANT)
def test_constants_decide(condition: Any) -> None:
    model = Branching(condition)
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True), masks(4, 0))
    assert graph.traced.decisions is None
    assert graph.traced.record == ()
    check(model, graph, lambda rows: masks(rows, 0))


def _written(m: Branching, a: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    view = found.view(-1)[1::2]
    view += x[:, 1]
    found[:, 0] = found[:, 1]
    return found[:, 0].any()


def _counted(m: Branching, a: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = x.sum() > 0
        return found.clone() if found else found


GIVEN = [
    lambda m, a, x: x.any(),
    lambda m, a, x: x.flatten().any().item(),
    lambda m, a, x: (x > 2).any(1).int().max() > 0,
    lambda m, a, x: int(x.any()) == 1,
    lambda m, a, x: not (x == 0).all(),
    lambda m, a, x: bool(x.max()) and bool(x.max() > 2),
    lambda m, a, x: torch.where(x > m.plain, 1, 0).sum(),
    lambda m, a, x: torch.cat([x, torch.zeros(x.shape[0], 1)], 1).reshape(x.shape[0] * 3).max(0).values > 1,
    lambda m, a, x: (x > 2).nonzero().shape[0] > 0,
    lambda m, a, x: x[x > 2].size(0) + 1 == 2,
    lambda m, a, x: x.max().item() > 4,
    _written,
    _counted,
]


@pytest.mark.parametrize("condition", GIVEN)
def test_the_call_decides(condition: Any) -> None:
    model = Branching(condition)
    graphs = {}
    for last in (5, 0):  # in the last of more rows than there are examples
        graph = graph_of(model, torch.randn(9, WIDTH, requires_grad=True), masks(9, last))
        check(model, graph, lambda rows, last=last: masks(rows, last))
        assert graph.traced.decisions is not None
        assert not graph.traced.decisions.hold([torch.randn(4, WIDTH), masks(4, 5 - last)])
        graphs[last] = graph
    assert graphs[0].task.graph_hash != graphs[5].task.graph_hash


def test_nothing_is_left_of_a_decision() -> None:
    model = Branching(lambda m, a, x: x.flatten().any())
    graph = graph_of(model, torch.randn(4, WIDTH), masks(4, 0))
    assert names(graph) == ["aten::linear", "aten::linear"]
    assert len(graph.traced.results) == 1
    always = graph_of(Branching(lambda m, a, x: False), torch.randn(4, WIDTH), masks(4, 0))
    assert graph.task.graph_hash == always.task.graph_hash


def test_one_row() -> None:
    model = Branching(lambda m, a, x: x.any())
    check(model, graph_of(model, torch.randn(1, WIDTH, requires_grad=True), masks(1, 3)), lambda rows: masks(rows, 3))


def test_arguments_are_not_changed_by_deciding() -> None:
    """Neither by tracing code that writes into them, nor by asking later what a call decides."""

    def condition(m: Branching, a: Tensor, x: Tensor) -> Tensor:
        x.masked_fill_(x == 3, 8)
        return (x == 8).any()

    given = [torch.randn(4, WIDTH), masks(4, 3)]
    graph = graph_of(Branching(condition), *given)
    assert graph.traced.leaf_paths == ()
    assert graph.traced.decisions is not None
    for mask, value in ((masks(4, 3), True), (masks(4, 8), True), (masks(4, 2), False)):
        kept = mask.clone()
        assert graph.traced.decisions.hold([given[0], mask]) == value
        assert torch.equal(mask, kept)
    assert torch.equal(given[1], masks(4, 3))


def _overwritten(m: Branching, a: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    view = found[0]
    found.copy_(a[:, :2] * 100)
    return view.any()


def _data(m: Branching, a: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros(2)
    found.data = a[0, :2] * 100
    return found.any()


@pytest.mark.parametrize(
    "condition",
    [
        lambda m, a, x: a.sum() > 0,
        lambda m, a, x: (x > m.limit).any(),
        lambda m, a, x: (x + torch.randint(0, 2, (2,))).any(),
        lambda m, a, x: nn.functional.dropout(x.double(), 0.5).any(),
        _overwritten,
        _data,
    ],
)
def test_what_depends_on_more_than_the_call_is_not_decided(condition: Any) -> None:
    model = nn.Sequential()
    model.inner = Branching(condition)
    model.forward = lambda a, mask: model.inner(a, mask)
    graph = graph_of(model, torch.randn(4, WIDTH), masks(4, 1))
    assert graph.traced.leaf_paths == ("inner",)
    assert graph.traced.decisions is None


def test_large_tensors_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concrete_values, "LARGEST", 100)
    model = Branching(lambda m, a, x: x.any())
    assert graph_of(model, torch.randn(6, WIDTH), masks(6, 1)).traced.decisions is not None
    assert graph_of(model, torch.randn(7, WIDTH), masks(7, 1)).traced.leaf_paths == ("",)


def test_random_numbers_are_as_before() -> None:
    model = Branching(lambda m, a, x: (torch.rand(3).sum() > 9) if x.any() else True)
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    graph_of(model, torch.ones(4, WIDTH), masks(4, 0))
    assert torch.equal(torch.randn(4), expected)


@pytest.mark.parametrize("assumed", [True, False])
def test_a_call_without_rows_decides_as_others_do(assumed: bool) -> None:
    model = Branching(lambda m, a, x: x.max() > 0)
    signature, tensors = signature_of(model, torch.randn(0, WIDTH), torch.zeros(0, 2, dtype=torch.int64))
    traced, _ = trace(model, signature, tensors, torch.device("cpu"), (assumed,))
    other = graph_of(model, torch.randn(4, WIDTH), masks(4, int(assumed)))
    assert traced.decisions is not None
    assert traced.decisions.values == (assumed,)
    assert [str(node) for node in traced.graph.nodes] == [str(node) for node in other.traced.graph.nodes]


def test_sizes_behind_a_branch() -> None:
    """What the branch says of a size is known behind it, and the values are those of each call."""

    def run(m: Branching, a: Tensor, x: Tensor) -> Tensor:
        index = (x[:, 0] >= 0).nonzero()
        if index.size(0) > 0:
            return torch.gather(a, 0, index.expand(index.size(0), a.size(1))).mean()
        return a.sum()

    model = Branching(lambda m, a, x: True)
    model.forward = lambda a, mask: run(model, model.yes(a), mask)  # type: ignore[method-assign]
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True), masks(4, 0) - 1)
    assert names(graph) == ["aten::linear", "aten::sum"]
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True), masks(4, 0))
    check(model, graph, lambda rows: masks(rows, 0) - (torch.arange(rows) % 3)[:, None])
    check(model, graph, lambda rows: masks(rows, 0) - (torch.arange(rows) % 2)[:, None])


def test_the_models_own_error_is_told() -> None:
    def condition(m: Branching, a: Tensor, x: Tensor) -> bool:
        if x.max() >= 7:
            raise ValueError("labels have to be below 7")
        return True

    model = Branching(condition)
    graph = graph_of(model, torch.randn(9, WIDTH, requires_grad=True), masks(9, 6))
    check(model, graph, lambda rows: masks(rows, 6))
    assert graph.traced.decisions is not None
    assert not graph.traced.decisions.hold([torch.randn(9, WIDTH), masks(9, 7)])
    with pytest.raises(TraceError, match=r"Branching\) fails.*ValueError: labels have to be below 7"):
        graph_of(model, torch.randn(9, WIDTH), masks(9, 7))


def test_a_call_that_the_code_cannot_take_is_another_graph() -> None:
    model = Branching(lambda m, a, x: torch.tensor([False, True])[x].any())
    graph = graph_of(model, torch.randn(4, WIDTH), masks(4, 1))
    assert graph.traced.decisions is not None
    assert graph.traced.decisions.hold([torch.randn(4, WIDTH), masks(4, 1)])
    assert not graph.traced.decisions.hold([torch.randn(4, WIDTH), masks(4, 2)])


def test_distributions_do_not_look_at_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a new process: the first use of Dynamo, in another test, switches it off for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def condition(m: Branching, a: Tensor, x: Tensor) -> bool:
        found = torch.distributions.Normal(a, a.exp())
        found.log_prob(a)
        return True

    model = Branching(condition)
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True), masks(4, 0))
    check(model, graph, lambda rows: masks(rows, 0))
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)
