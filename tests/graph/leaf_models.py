"""Models with a part that may be opaque, and the check that their graphs are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pieces import assert_same, eager, graph_of, in_pieces
from torch import Tensor, nn

from rannd.graph.model import ModelGraph

WIDTH = 6


class Between(nn.Module):
    """A layer, something, and a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Any:
        return self.after(self.inner(self.before(a)))


def check(model: nn.Module, leaves: tuple[str, ...], rows: tuple[int, ...] = (4, 1, 3)) -> ModelGraph:
    """The graph of a model, equal to the model for several sizes of the batch, with gradients and buffers."""
    graph = graph_of(model, torch.randn(rows[0], WIDTH, requires_grad=True))
    assert graph.traced.leaf_paths == leaves
    for count in rows:
        given = [torch.randn(count, WIDTH, requires_grad=True)]
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        expected = eager(graph, model, given)
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
        assert_same(in_pieces(graph, model, given, [count]), expected)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, after[name])
    return graph


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        return self.positive(a) if a.sum() > 0 else self.negative(a)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 42


class Function(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return Scaled.apply(a)


class Counting(nn.Module):
    """Writes into a buffer, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean * 0.9 + a.detach().mean(0) * 0.1
        if a.shape[0] < 2:
            return a
        return self.norm(a) if a.sum() > 0 else -self.norm(a)


@dataclass
class Pair:
    one: Tensor
    more: dict[str, Any]


class Nested(nn.Module):
    def forward(self, pair: Pair, *, scale: float, rows: int, names: tuple[str, ...]) -> Any:
        if pair.one.sum() > 0:
            return {"sum": pair.one + pair.more["two"] * scale, "count": 3, "size": names}
        return {"sum": pair.one * rows, "count": 3, "size": names}


class Masking(nn.Module):
    """A large module with one method that stands in the way; it has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.filling = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("share", torch.tensor(0.5))

    def masked(self, a: Tensor, *, sign: float) -> Tensor:
        self.calls += 1
        if a.sum() > 0:
            return torch.where(a > self.share, a, self.filling * sign)
        return a * self.filling

    def forward(self, a: Tensor) -> Tensor:
        return self.masked(self.layers(a), sign=1.0) + self.masked(a, sign=-1.0)


class Root(nn.Module):
    """The call stands in the root module's own forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, a: Tensor) -> Any:
        return self.after(self.function(self.before(a)))


class Apart(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor) -> Any:
        return self.function(a)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), inner])

    def forward(self, a: Tensor) -> Tensor:
        for block in self.blocks:
            a = block(a)
        return a
