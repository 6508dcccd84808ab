"""Grains of real models: what is measured apart adds up to the whole, and is the same in deeper models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pieces import signature_of
from test_analytic import really_kept
from test_measure import graph_of as measured_graph
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import ZOO

from rannd.graph.model import ModelGraph
from rannd.graph.partition.block_hash import block_hashes, crossing
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.grains import MOST, make_grains
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.plan_options import PlanOptions
from rannd.profile.block_costs import block_part, measure_alone
from rannd.profile.kept_values import Memory
from rannd.profile.points import total


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = {"n_embd": 32, "n_layer": layers, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(input_ids=tokens, labels=tokens).loss


class Mlp(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum(1).mean()


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).sum((1, 2)).mean()


DEEP = [(Gpt, torch.ones(4, 16, dtype=torch.long)), (Mlp, torch.ones(4, 8)), (Encoder, torch.ones(4, 5, 16))]
DEEPER = (3, 4, 6, 12, 13), (3, 4, 6, 12, 24, 25, 48)
"""Numbers of layers: some, and all."""


def grains_of(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    return make_grains(graph.task, make_atoms(graph.task))


@pytest.mark.long
@pytest.mark.parametrize("deeper", [DEEPER[0], pytest.param(DEEPER[1], marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize(("build", "given"), DEEP, ids=[build.__name__ for build, _ in DEEP])
def test_a_deeper_model_has_nothing_new_to_measure(
    build: Callable[[int], nn.Module], given: Tensor, deeper: tuple[int, ...]
) -> None:
    known: set[str] = set()
    for layers in deeper:
        graph, _ = measured_graph(build(layers), given)
        grains = grains_of(graph)
        blocks = make_blocks(Partitioning.of(graph.task), PlanOptions(), world=2)
        for block in blocks:
            inside = [grain for grain in grains if set(grain) & set(block.ops)]
            assert sorted(op for grain in inside for op in grain) == sorted(block.ops), "a block has whole grains"
        hashes = set(block_hashes(graph.task, grains))
        if known:
            assert hashes <= known, layers
        known |= hashes


def test_more_stages_than_grains_are_made_of_atoms() -> None:
    graph, _ = measured_graph(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Tanh(), nn.Sigmoid()), torch.ones(4, 8))
    assert len(grains_of(graph)) == 1
    assert (
        len(make_blocks(Partitioning.of(graph.task), PlanOptions(partition_num=4, min_partition_num=1), world=4)) == 4
    )


def test_a_long_way_without_parameters_has_several_grains() -> None:
    graph, _ = measured_graph(nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(3 * MOST))), torch.ones(4, 8))
    assert max(map(len, grains_of(graph))) <= MOST
    assert len(grains_of(graph)) == 4


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("t5", "resnet")),
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("bert", "mobilenet-v2", "llama", "vit", "nn.Transformer")
        ),
    ],
)
def test_what_grains_keep_adds_up_to_what_the_model_keeps(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    with entry.precision():
        torch.manual_seed(0)
        model, batch = entry.build(), entry.batch(4)
        graph, sample = measured_graph(model, **batch)
        true = really_kept(graph, model, signature_of(model, **batch)[1])
        grains, values = grains_of(graph), graph.task.values
        parts = []
        for grain, border in zip(grains, crossing(graph.task, grains), strict=True):
            names = [values[value].name for value in border]
            parts.append(measure_alone(block_part(graph, grain), sample, (4,), names).cost(4, border))
    told = total(parts, Memory(graph.task)).activation_bytes.at(4)
    assert 0.98 * true <= told <= 1.12 * true
