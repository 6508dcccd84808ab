"""Branches on random numbers: layers that are dropped at random are computed, and chosen from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pieces import assert_same, eager, graph_of, in_pieces
from thinned import first
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rannd.graph.fx.aliasing import base_name
from rannd.graph.model import ModelGraph
from rannd.graph.tracing import frontend

WIDTH = 6

pytestmark = pytest.mark.usefixtures("double")


class Drawn(TorchDispatchMode):
    """Random numbers that are drawn one at a time are these."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self._left = iter(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.rand.default and list(args[0]) == []:
            return torch.tensor(next(self._left), dtype=(kwargs or {}).get("dtype"))
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Three layers in which anything may happen."""

    def __init__(self, run: Callable[[Layers, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, a: Tensor) -> Any:
        return self.run(self, a)


def check(graph: ModelGraph, model: nn.Module, chances: int) -> None:
    """The graph computes what the model computes, for all outcomes."""
    assert graph.traced.leaf_paths == ()
    for draws in itertools.product((0.1, 0.9), repeat=chances):
        for rows in (4, 1, 3):
            given = [torch.randn(rows, WIDTH, requires_grad=True)]
            with Drawn(draws):
                expected = eager(graph, model, given)
            with Drawn(draws):
                found = in_pieces(graph, model, given, [rows])
            assert_same(found, expected)


def _dropped(m: Layers, a: Tensor) -> Tensor:
    for layer in m.layers:
        if torch.rand([]) < 0.5:
            continue
        a = layer(a)
    return m.norm(a)


def _flagged(m: Layers, a: Tensor) -> Tensor:
    """The flag is used later, and not as it is."""
    flags = [torch.rand([]) <= 0.5 for _ in m.layers]
    a = m.norm(a)
    for flag, layer in zip(flags, m.layers, strict=True):
        skip = bool(flag)
        a = a * 2
        if not skip or not flag:
            a = layer(a)
    return a


def _kept(m: Layers, a: Tensor) -> Tensor:
    """The layer runs where the number is large."""
    for layer in m.layers:
        if torch.rand([]) > 0.5:
            a = layer(a) + a.shape[0]
    return a


def _several(m: Layers, a: Tensor) -> tuple[Tensor, ...]:
    """Two values are chosen; all of them are returned."""
    b = a.sin()
    states = [a]
    for layer in m.layers:
        if not torch.rand(()).lt(0.5).item():
            a, b = layer(b), layer(a) + b
        states.append(a)
    return (*states, b)


@pytest.mark.parametrize(("run", "chances"), first(2, [(_several, 3), (_dropped, 3), (_flagged, 3), (_kept, 3)]))
def test_layers_that_are_dropped(run: Any, chances: int) -> None:
    model = Layers(run)
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True))
    check(graph, model, chances)


def test_a_dropped_layer_gets_gradients_of_zero() -> None:
    model = Layers(_dropped)
    graph = graph_of(model, torch.randn(4, WIDTH))
    with Drawn([0.1, 0.9, 0.9]):
        _, gradients = in_pieces(graph, model, [torch.randn(4, WIDTH)], [4])
    assert not gradients["layers.0.0.weight"].any()
    assert gradients["layers.1.0.weight"].any()


@pytest.mark.parametrize("outcome", [True, False])
def test_outcomes_that_are_certain(outcome: bool) -> None:
    limit = 1.0 if outcome else 0.0

    def run(m: Layers, a: Tensor) -> Tensor:
        ways = [
            torch.rand([]) < limit,
            torch.rand(()).lt(int(limit)),
            (torch.rand([]) <= (1 if outcome else -1)).item(),
            torch.rand([], dtype=torch.float32) < limit,
            not torch.rand([]) >= limit,
            not torch.rand([]) > (1 if outcome else -0.5),
        ]
        for way in ways:
            a = m.layers[0](a) if way else m.layers[1](a)
        return a

    model = Layers(run)
    graph = graph_of(model, torch.randn(4, WIDTH, requires_grad=True))
    assert graph.traced.record == ()
    layer = "layers.0.0.weight" if outcome else "layers.1.0.weight"
    assert {name for name in graph.traced.attributes.values() if name.endswith("weight")} == {layer}
    given = [torch.randn(3, WIDTH, requires_grad=True)]
    assert_same(in_pieces(graph, model, given, [3]), eager(graph, model, given))


def _nested(m: Layers, a: Tensor) -> Tensor:
    if torch.rand([]) < 0.5:
        a = m.layers[0](a) if torch.rand([]) < 0.5 else m.layers[1](a)
    return a


def _else(m: Layers, a: Tensor) -> Tensor:
    return m.layers[0](a) if torch.rand([]) < 0.5 else m.layers[1](a)


def _statistics(m: Layers, a: Tensor) -> Tensor:
    return a if torch.rand([]) < 0.5 else m.batch_norm(a)


def _written(m: Layers, a: Tensor) -> Tensor:
    a = a * 2
    b = a
    if torch.rand([]) >= 0.5:
        b = m.layers[0](a)
    b.add_(1)
    return a + b


def _shaped(m: Layers, a: Tensor) -> Tensor:
    b = a[:, :3]
    if torch.rand([]) < 0.5:
        b = a
    return b.sum()


def _together(m: Layers, a: Tensor) -> Tensor:
    first, second = torch.rand([]) < 0.5, torch.rand([]) < 0.5
    count = bool(first) + bool(second)
    return m.layers[0](a) if count < 2 else a


def _inside(m: Layers, a: Tensor) -> Tensor:
    with torch.no_grad():
        skip = torch.rand([]) < 0.5
        b = a.cos()
        if not skip:
            b = b * 2
    return m.layers[0](a) + b


@pytest.mark.parametrize("run", [_nested, _else, _statistics, _written, _shaped, _together, _inside])
def test_branches_that_do_more_than_choose_are_leaves(run: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers(run)
            self.last = nn.Linear(WIDTH, WIDTH) if run is not _shaped else nn.Identity()

        def forward(self, a: Tensor) -> Tensor:
            return self.last(self.inner(a))

    graph = graph_of(Around(), torch.randn(4, WIDTH))
    assert graph.traced.leaf_paths == ("inner",)


def test_too_many_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "MOST_CHANCES", 2)
    graph = graph_of(Layers(_dropped), torch.randn(4, WIDTH))
    assert graph.traced.leaf_paths == ("",)
    assert "3, which are too many" in graph.traced.record[0]


def test_random_layers_are_chosen_with_their_probability() -> None:
    model = Layers(_dropped)
    graph = graph_of(model, torch.randn(4, WIDTH))
    assert sum(base_name(node) == "where" for node in graph.traced.graph.nodes if node.op == "call_function") == 3
    given = [torch.randn(2, WIDTH)]
    found = {tuple(in_pieces(graph, model, given, [2])[0][0][0].tolist()) for _ in range(200)}
    assert len(found) == 8
