"""Random numbers of numpy and Python: the modules that draw them run as they are, and draw new ones each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pieces import assert_same, eager, graph_of, in_pieces
from torch import Tensor, nn

WIDTH = 6


class Masked(nn.Module):
    """Multiplies by what is drawn."""

    def __init__(self, draw: Callable[[Masked], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.python = random.Random(1)
        self.generator = np.random.default_rng(1)
        self.old = np.random.RandomState(1)
        self.named = {"mask": [random.Random(1)]}

    def forward(self, a: Tensor) -> Tensor:
        return self.layer(a) * torch.as_tensor(self.draw(self), dtype=torch.float32)


class Between(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        return self.after(self.inner(self.before(a)))


def _states(model: Between) -> list[str]:
    inner = model.inner
    assert isinstance(inner, Masked)
    states = (
        random.getstate(),
        np.random.get_state(),
        inner.python.getstate(),
        inner.old.get_state(),
        inner.named["mask"][0].getstate(),
    )
    return [*map(str, states), str(inner.generator.bit_generator.state)]


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda m: np.random.rand(WIDTH).tolist(), "numpy"),
        (lambda m: random.random(), "Python's random"),
        (lambda m: m.python.gauss(0, 1), "attribute python of module inner"),
        (lambda m: m.generator.random(WIDTH), "attribute generator of module inner"),
        (lambda m: m.old.rand(WIDTH), "attribute old of module inner"),
        (lambda m: m.named["mask"][0].random(), "a generator in attribute named of module inner"),
        (lambda m: (np.random.rand(), np.random.seed(3), np.random.rand())[0], "numpy"),
        (lambda m: (np.random.seed(None), np.random.rand())[1], "numpy"),
    ],
)
def test_the_module_that_draws_is_a_leaf(draw: Any, name: str) -> None:
    model = Between(Masked(draw))
    np.random.seed(4)
    random.seed(4)
    before = _states(model)
    graph = graph_of(model, torch.randn(4, WIDTH))
    assert _states(model) == before
    assert graph.traced.leaf_paths == ("inner",)
    assert f"draws random numbers with {name}, which a graph would repeat in every step" in graph.traced.record[0]
    given = [torch.randn(3, WIDTH)]
    first, second = (in_pieces(graph, model, given, [3])[0][0] for _ in range(2))
    assert not torch.equal(first, second)


def test_strict_export_lets_torch_draw_for_numpy() -> None:
    model = Between(Masked(lambda m: np.random.rand(WIDTH)))
    graph = graph_of(model, torch.randn(4, WIDTH))
    assert graph.traced.record[1] == "exported in strict mode"
    given = [torch.randn(3, WIDTH)]
    first, second = (in_pieces(graph, model, given, [3])[0][0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "draw",
    [
        lambda m: (np.random.seed(3), np.random.rand(WIDTH), np.random.rand(WIDTH))[2],
        lambda m: (random.seed(3), random.random())[1],
        lambda m: np.random.RandomState(5).rand(WIDTH),
        lambda m: random.Random(5).random(),
    ],
)
def test_numbers_that_are_always_the_same_are_constants(draw: Any) -> None:
    model = Between(Masked(draw))
    before = _states(model)
    graph = graph_of(model, torch.randn(4, WIDTH))
    assert _states(model) == before
    assert graph.traced.leaf_paths == ()
    given = [torch.randn(3, WIDTH)]
    assert_same(in_pieces(graph, model, given, [3]), eager(graph, model, given), within=1e-5)


def test_the_models_own_draws() -> None:
    graph = graph_of(Masked(lambda m: random.random()), torch.randn(4, WIDTH))
    assert graph.traced.leaf_paths == ("",)
