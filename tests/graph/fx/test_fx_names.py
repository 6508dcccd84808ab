"""Modules and parameters may have any names that torch allows them: keys of dicts are often no names in Python."""

from __future__ import annotations

import pytest
import torch
from pieces import assert_same, eager, graph_of, in_pieces
from thinned import first
from torch import Tensor, nn

from rannd.graph.model import build
from rannd.graph.stored.codec import decode, encode
from rannd.graph.tracing.frontend import trace

pytestmark = pytest.mark.usefixtures("double")


class Inner(nn.Module):
    """Parameters, buffers and a constant, some of them in a region of their own, and a branch that a mask decides."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.rand(4) + 0.5)})
        setattr(self, f"{name}2", torch.rand(4))

    def forward(self, a: Tensor, mask: Tensor) -> Tensor:
        constant = getattr(self, f"{self.name}2")
        with torch.no_grad():
            factor = (self.scales[self.name] * constant).sum() + a.mean()
        if (mask * constant[0] > 0).all():
            factor = factor * constant
        return self.layers[self.name](a) * self.scales[self.name] * factor


class Deciding(nn.Module):
    """An opaque operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4)})
        self.name = name

    def forward(self, a: Tensor) -> Tensor:
        made = self.parts[self.name](a)
        return made if made.sum() > 0 else made * 2


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Inner(name), f"{name}:leaf": Deciding(name), f"{name}:": Inner(name)})
        self.name = name

    def forward(self, a: Tensor, mask: Tensor) -> Tensor:
        a = self.parts[f"{self.name}:leaf"](self.parts[self.name](a, mask))
        return self.parts[f"{self.name}:"](a, mask)


@pytest.mark.parametrize(
    "name", first(1, ["new\nline", "class", "größe", "'\"", "it's", 'a"b', "\\n", "{a}", "a b", "a-b", "0"])
)
def test_any_name(name: str) -> None:
    model = Named(name)
    given = [torch.randn(3, 4, requires_grad=True), torch.ones(3, 4)]
    graph = graph_of(model, *given)
    assert graph.traced.leaf_paths == (f"parts.{name}:leaf",)
    assert graph.traced.decisions is not None
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}

    def same(graph: object) -> None:
        expected = eager(graph, model, given)  # type: ignore[arg-type]
        for key, buffer in model.named_buffers():
            buffer.data.copy_(before[key])
        assert_same(in_pieces(graph, model, given, [3]), expected)  # type: ignore[arg-type]

    same(graph)
    stored = encode(trace(model, graph.signature, given, torch.device("cpu"))[0], None)
    again = build(model, graph.signature, given, torch.device("cpu"), decode(stored, model)[0])
    assert again.task.graph_hash == graph.task.graph_hash
    same(again)
