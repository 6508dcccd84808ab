"""Hashes: equal for equal graphs everywhere, different for anything that changes what is computed or what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import graph_of
from torch import Tensor, nn

from rannd.graph.cut import extract
from rannd.graph.hashing import part_hash
from rannd.graph.model import ModelGraph

HERE = Path(__file__).parent


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


REFERENCE = digest()


def test_weights_and_batch_size_do_not_matter() -> None:
    assert digest(seed=5) == REFERENCE
    for rows in (1, 7):
        assert digest(rows=rows) == REFERENCE


def test_equal_in_another_process() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_hashing; print(test_hashing.REFERENCE)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(HERE)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == REFERENCE


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"width": 16},
        {"p": 0.2},
        {"eps": 1e-6},
        {"tied": False},
        {"act": torch.tanh},
        {"scale": 3.0},
        {"constant": 2.0},
        {"time": 6},
    ],
    ids=str,
)
def test_a_change_changes_it(change: dict[str, Any]) -> None:
    assert digest(**change) != REFERENCE


def test_modes_and_types_change_it() -> None:
    ids = torch.randint(0, 11, (4, 5))
    frozen = Model()
    frozen.layers[0][0].weight.requires_grad_(False)
    found = [REFERENCE, graph_of(Model().eval(), ids).task.graph_hash, graph_of(frozen, ids).task.graph_hash]
    found.append(graph_of(Model().double(), ids).task.graph_hash)
    found.append(graph_of(Model(), ids.int()).task.graph_hash)
    with torch.no_grad():
        found.append(graph_of(Model(), ids).task.graph_hash)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(graph_of(Model(), ids).task.graph_hash)
    assert len(set(found)) == len(found)


def test_an_inputs_gradient_changes_it() -> None:
    model = nn.Linear(3, 3)
    plain, wanted = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    assert graph_of(model, plain).task.graph_hash != graph_of(model, wanted).task.graph_hash


def layer_hashes(graph: ModelGraph, autocast: str = "") -> list[str]:
    """Hash of each layer as a part."""
    members: dict[str, set[Any]] = {}
    for task, node in zip(graph.task.ops, graph.nodes.values(), strict=True):
        if task.module.startswith("layers."):
            members.setdefault(task.module.split(".")[1], set()).add(node)
    parts = [extract(graph.traced, graph.placement, nodes, "Layer") for nodes in members.values()]
    return [part_hash(part, lambda node: node in graph.placement.requires_grad, autocast) for part in parts]


def test_equal_layers_have_equal_parts() -> None:
    graph = model_graph(layers=3)
    assert len(layer_hashes(graph)) == 3
    assert set(layer_hashes(graph)) == set(layer_hashes(model_graph(seed=9, rows=6, layers=2)))


@pytest.mark.parametrize("change", [{"width": 16}, {"p": 0.3}, {"eps": 1e-3}, {"time": 7}], ids=str)
def test_other_layers_have_other_parts(change: dict[str, Any]) -> None:
    assert set(layer_hashes(model_graph())).isdisjoint(layer_hashes(model_graph(**change)))


def test_frozen_weights_have_parts_of_their_own() -> None:
    """Their backward costs less."""
    model = Model()
    model.layers[1].requires_grad_(False)
    first, second = layer_hashes(graph_of(model, torch.randint(0, 11, (4, 5))))
    assert first == layer_hashes(model_graph())[0]
    assert second != first


def test_autocast_has_parts_of_its_own() -> None:
    graph = model_graph()
    assert set(layer_hashes(graph)).isdisjoint(layer_hashes(graph, "cpu:torch.bfloat16"))
