"""A small model with layers that are alike, and its graph's hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pieces import graph_of
from torch import Tensor, nn

from rannd.graph.model import ModelGraph


class Model(nn.Module):
    def __init__(
        self, *, layers: int = 2, width: int = 8, p: float = 0.1, eps: float = 1e-5, tied: bool = True,
        act: Callable[[Tensor], Tensor] = torch.relu, scale: float = 2.0, constant: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, eps=eps), nn.Dropout(p)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.act = act
        self.scale = scale
        self.constant = torch.full((width,), constant)

    def forward(self, ids: Tensor) -> Tensor:
        a = self.table(ids) * self.scale + self.constant
        for layer in self.layers:
            a = self.act(layer(a))
        return self.head(a)


def model_graph(*, seed: int = 0, rows: int = 4, time: int = 5, **options: Any) -> ModelGraph:
    torch.manual_seed(seed)
    return graph_of(Model(**options), torch.randint(0, 11, (rows, time)))


def digest(**options: Any) -> str:
    return model_graph(**options).task.graph_hash
