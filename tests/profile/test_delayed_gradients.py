"""What a formula says may be delayed is what separates, and what it says this keeps is what waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pieces import graph_of, state_of
from plan_graphs import GraphBuilder
from torch import Tensor, nn

from rannd.graph.partition.cut import extract
from rannd.graph.weight_gradients.separation import separate
from rannd.graph.weight_gradients.weight_queue import Delayed, WeightQueue
from rannd.profile.delayed_gradients import delayed_bytes, separable
from rannd.profile.kept_values import Memory

ROWS, WIDTH = 4, 8


class Words(nn.Module):
    """Lookups, products, a convolution, and layers that stay whole."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv = nn.Conv1d(3, 5, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.function(self, words)


MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chain": lambda m, a: m.two(F.gelu(m.one(m.norm(m.table(a))))),
    "one input, two products": lambda m, a: (lambda x: m.one(x).relu() * (x @ m.one.weight.t()))(m.table(a).tanh()),
    "tied": lambda m, a: F.linear(m.two(m.one(m.table(a)).tanh()), m.table.weight),
    "a weight that is read otherwise, too": lambda m, a: m.two(m.one(m.table(a))) + m.two.weight.sum(),
    "convolution": lambda m, a: m.conv(m.table(a)).relu(),
}


def _tensors(delayed: Delayed) -> list[Tensor]:
    """What waits, without parameters."""
    held = [each for each in delayed.gradients.args if isinstance(each, Tensor)]  # type: ignore[attr-defined]
    return [each for each in held if not any(each is parameter for parameter in delayed.read)]


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_counts_what_separates_and_what_waits(name: str) -> None:
    torch.manual_seed(1)
    model, words = Words(MODELS[name]), torch.randint(11, (ROWS, 3))
    graph = graph_of(model, words)
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    separated = separate(part, [parameter for parameter, _ in model.named_parameters()])
    assert separated is not None
    state, queue = state_of(graph, model), WeightQueue()
    given = [words, *(state[name] for name in part.tensors), *part.numbers_at(ROWS)]
    (made,) = separated.module(*given, queue)
    made.backward(torch.randn_like(made))
    found = separable(graph.task)
    assert len(found) == len(queue)
    waiting = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for delayed in queue._waiting
        for tensor in _tensors(delayed)
    }
    told = delayed_bytes(Memory(graph.task), range(len(graph.task.ops)), found).at(ROWS)
    assert sum(waiting.values()) <= told <= 1.1 * sum(waiting.values())


def test_operators_separate_by_name_and_by_what_else_reads_their_parameters() -> None:
    builder = GraphBuilder()
    shared, frozen, alone = builder.param(8), builder.param(8, trainable=False), builder.param(8)
    x = builder.input(4.0)
    x = builder.op([x], params=[shared])
    x = builder.op([x], params=[frozen])
    x = builder.op([x], params=[alone])
    x = builder.op([x], params=[shared, alone], target="aten::addmm")
    assert separable(builder.build()) == {0, 2, 3}
    builder.op([x], params=[shared], target="aten::mul.Tensor")
    assert separable(builder.build()) == set(), "one parameter leads to the other"
