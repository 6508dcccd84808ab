"""Code of graphs that calls operators in C++ by local names."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from rannd.graph.fx.direct_calls import direct_module
from rannd.graph.fx.fx_names import graph_module

aten: Any = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.where(x > 0, x @ self.weight, x.exp()).split([1, 2], dim=1)
        return torch.cat([found[1], found[0]], 1)[:, :2].to(torch.float64).sum(dim=(0,), keepdim=True)


def _exported() -> tuple[Graph, tuple[torch.Tensor, ...]]:
    x = torch.randn(4, 3)
    model = Model()
    return torch.export.export(model, (x,)).graph, (model.weight, x)


def test_operators_are_called_directly_with_equal_results() -> None:
    graph, given = _exported()
    plain, direct = graph_module(nn.Module(), copy.deepcopy(graph)), direct_module(nn.Module(), graph, "Stage")
    assert type(direct).__name__ == "Stage"
    assert torch.equal(plain(*given)[0], direct(*given)[0])
    assert not re.search(r"torch\.ops[\w.]+\(", direct.code)
    assert re.search(r"torch\.ops[\w.]+\(", plain.code)
    (expected,) = torch.autograd.grad(plain(*given)[0].sum(), given[0])
    (found,) = torch.autograd.grad(direct(*given)[0].sum(), given[0])
    assert torch.equal(expected, found)


def test_changed_and_copied_graphs_are_too() -> None:
    graph, given = _exported()
    direct = direct_module(nn.Module(), graph, "Stage")
    expected = copy.deepcopy(direct)
    assert torch.equal(expected(*given)[0], direct(*given)[0])
    (node,) = graph.find_nodes(op="call_function", target=aten.exp.default)
    node.target = aten.sin.default
    direct.recompile()
    assert "sin" in direct.code
    assert not torch.equal(expected(*given)[0], direct(*given)[0])
    assert not re.search(r"torch\.ops[\w.]+\(", direct.code + expected.code)


def test_names_of_nodes_are_left_to_them() -> None:
    graph = Graph()
    x = graph.placeholder("aten_neg_default")
    y = graph.placeholder("aten_neg_default_")
    graph.output((graph.call_function(aten.neg.default, (x,)), graph.call_function(aten.sub.Tensor, (x, y))))
    found = direct_module(nn.Module(), graph, "Stage")(torch.ones(2), torch.zeros(2))
    assert [each.tolist() for each in found] == [[-1, -1], [1, 1]]


def test_what_is_no_operator_in_cpp_is_called_as_before() -> None:
    graph = torch.export.export(_Branching(), (torch.ones(2),)).graph
    inner = torch.export.export(_Branching(), (torch.ones(2),)).graph_module
    direct = direct_module(inner, graph, "Stage")
    assert "torch.ops.higher_order.cond(" in direct.code
    for value in (torch.ones(2), -torch.ones(2)):
        assert torch.equal(direct(value)[0], _Branching()(value))


@torch.library.custom_op("rannd_direct::calls_f", mutates_args=())
def _first(x: torch.Tensor, text: str) -> torch.Tensor:
    return x + len(text)


@torch.library.custom_op("rannd_direct_calls::f", mutates_args=())
def _second(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operators_of_like_names_and_text_that_looks_like_a_call() -> None:
    text = "\ny = torch.ops.aten.neg.default(x)"
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.rannd_direct.calls_f.default, (x, text))
    second = graph.call_function(torch.ops.rannd_direct_calls.f.default, (x,))
    graph.output((first, second))
    direct = direct_module(nn.Module(), graph, "Stage")
    assert "calls_f_default_(" in direct.code
    assert [each.item() for each in direct(torch.tensor(1.0))] == [1 + len(text), 2]


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 3, (x,))


def test_errors_of_operators_are_those_of_torch() -> None:
    graph, (weight, _) = _exported()
    direct: GraphModule = direct_module(nn.Module(), graph, "Stage")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        direct(weight, torch.ones(2, 5))
