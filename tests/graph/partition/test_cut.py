"""Cut into stages, a model computes what it computed: outputs and buffers to the last bit, gradients to rounding."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from pieces import Small, assert_same, graph_of
from row_cases import INDEPENDENT, img, marks, seq, x
from stages import buffers_kept, parts_of, random_stages, run_eager, run_stages, segments_of
from torch import Tensor, nn
from torch.fx import Node

from rannd.errors import CutError
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import cut, extract, stages_by_owner

pytestmark = pytest.mark.usefixtures("double")


def _written_tensor(m: Any, a: Tensor) -> Tensor:
    """A tensor made without gradient that gets one by being written into."""
    out = torch.zeros(a.shape[0], 6)
    out[:, :3] = (a @ m.w)[:, :3]
    half = out[:, 3:]
    half.copy_((a @ m.w.t())[:, 3:])
    return (out * 2).tanh() @ m.w


def _batch_norm(m: Any, a: Tensor) -> Tensor:
    return m.batch_norm((m.batch_norm(a @ m.w).relu() @ m.w).tanh()) @ m.w


def _running(m: Any, a: Tensor) -> Tensor:
    with torch.no_grad():
        m.running.mul_(0.9).add_(a.mean(0), alpha=0.1)
    m.count += 1
    return (a @ m.w - m.running).tanh() * m.count @ m.w


def _tuples(m: Any, a: Tensor) -> Tensor:
    out, (h, _) = m.lstm(a @ m.w)
    first, second = (out @ m.w).tanh().chunk(2, -1)
    values, _ = (first * second).topk(2, -1)
    return values.sum((1, 2)) + h[0].sum(-1)


def _skips(m: Any, a: Tensor) -> tuple[Tensor, Tensor]:
    keep = (a @ m.w).tanh()
    b = keep
    for _ in range(4):
        b = (b @ m.w + m.b).tanh() + keep
    return b, keep


def _mask(m: Any, a: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & (a[:, :, 0] > 0)[:, None]
    for _ in range(3):
        a = (a @ m.w).tanh()
        a = (a @ a.mT).masked_fill(~mask, -9.0).softmax(-1) @ a
    return a


def _padding(m: Any, a: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & (y >= 0)[:, None]
    for _ in range(3):
        a = (a @ m.w).tanh()
        a = (a @ a.mT).masked_fill(~mask, -9.0).softmax(-1) @ a
    return a


def _wide_bias(m: Any, a: Tensor, y: Tensor) -> Tensor:
    bias = (y[:, :, None] >= 0) * torch.arange(40.0)  # larger than the values that go through the layers
    for _ in range(3):
        a = (a @ m.w + bias.amax(-1, keepdim=True)).tanh()
        a = a * bias.sum(-1, keepdim=True)
    return a


def _views(m: Any, a: Tensor) -> Tensor:
    b = (a @ m.w).view(-1, 2, 3)
    top = b[:, 0]
    b.mul_(2.0)
    flat = b.reshape(-1, 6)
    flat.add_(m.b)
    return (flat @ m.w).tanh() + torch.cat([top, b[:, 1]], 1)


def _regions(m: Any, a: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (a @ m.w).abs().amax(1, keepdim=True) + m.b.abs()
    with torch.autocast("cpu", enabled=False):
        b = (a / scale @ m.w).tanh()
    return (b @ m.w).tanh() + scale


CASES: dict[str, tuple[Any, list[Any]]] = {
    "written tensor": (_written_tensor, [x]),
    "batch norm": (_batch_norm, [x]),
    "running": (_running, [x]),
    "tuples": (_tuples, [seq]),
    "skips": (_skips, [x]),
    "mask": (_mask, [seq]),
    "padding": (_padding, [seq, marks]),
    "wide bias": (_wide_bias, [seq, marks]),
    "views": (_views, [x]),
    "regions": (_regions, [x]),
    "images": (lambda m, a: m.group_norm(m.conv(a)).relu_().flatten(1).tanh().sum(1), [img]),
    "attention": (lambda m, a: m.norm(m.attention(a, a, a)[0] + a) @ m.w, [seq]),
    **{
        name: INDEPENDENT[name]
        for name in (
            "twice",
            "number",
            "input given back",
            "padded with regulariser",
            "two padded losses",
            "mean and sum",
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_stage_by_stage_is_exact(name: str) -> None:
    function, arguments = CASES[name]
    torch.manual_seed(1)
    model = Small(function)
    tensors = [make() for make in arguments]
    graph = graph_of(model, *tensors)
    with buffers_kept(model) as buffers:
        expected = run_eager(graph, model, tensors)
    generator = random.Random(name)
    for stages, divided in itertools.product((1, 2, 3, 4, 5, 5), (parts_of, segments_of)):
        parts = divided(graph, random_stages(graph, stages, generator))
        with buffers_kept(model) as found:
            outcome = run_stages(graph, model, parts, tensors)
        assert_same(outcome, expected, exact="padded" not in name)
        for key, buffer in buffers.items():
            assert torch.equal(found[key], buffer), key


def _by_matmul(graph: ModelGraph) -> dict[Node, int]:
    """A number for each op: how many products of matrices there are up to it."""
    count, found = 0, {}
    for node in graph.placement.placed:
        count += "matmul" in node.name
        found[node] = count
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_segments_hand_over_what_is_computed_from_arguments(recompute: bool) -> None:
    graph = graph_of(Small(_padding), seq(), marks())
    parts = segments_of(graph, _by_matmul(graph), recompute)
    made = Counter(node.name for part in parts for node in part.module.graph.nodes if node.op == "call_function")
    mask = next(node for node in graph.placement.early if node.name == "and_1")
    assert made["tril"] == made["and_1"] == (3 if recompute else 1)
    readers = [number for number, part in enumerate(parts) if mask in part.inputs]
    assert len(readers) == (0 if recompute else 2)
    assert [mask in part.outputs for part in parts].count(True) == (0 if recompute else 1)


def test_segments_do_not_hand_over_what_is_larger_than_all_else() -> None:
    graph = graph_of(Small(_wide_bias), seq(), marks())
    bias = next(node for node in graph.placement.early if node.name == "mul")
    for part in segments_of(graph, _by_matmul(graph)):
        assert bias not in (*part.inputs, *part.outputs)


def test_written_tensors_get_gradients_at_a_boundary() -> None:
    graph = graph_of(Small(_written_tensor), x())
    zeros = next(node for node in graph.placement.placed if "zeros" in node.name)
    assert zeros in graph.placement.requires_grad


def test_parts_name_what_they_need() -> None:
    model = Small(lambda m, a: (a @ m.w).tanh() @ m.table.weight.t()[:, :3] * a.shape[0])
    graph = graph_of(model, x())
    last = next(node for node in graph.placement.placed if node.name.startswith("matmul_1"))
    part = extract(graph.traced, graph.placement, {last}, "Last")
    assert part.tensors == ("table.weight",)
    assert [node.name for node in part.inputs] == ["tanh"]
    assert part.outputs == (last,)
    assert not part.random


def test_a_part_with_dropout_is_random() -> None:
    model = Small(lambda m, a: m.drop(a @ m.w).tanh())
    graph = graph_of(model, x())
    flags = {node.name: extract(graph.traced, graph.placement, {node}, "One").random for node in graph.placement.placed}
    assert [name for name, flag in flags.items() if flag] == ["dropout"]
    graph = graph_of(model.eval(), x())
    assert not graph.placement.random


def test_a_stage_may_not_read_from_a_later_one() -> None:
    graph = graph_of(Small(lambda m, a: (a @ m.w).tanh()), x())
    first, second = graph.placement.placed
    with pytest.raises(CutError, match=r"tanh in stage 0 reads matmul of stage 1"):
        cut(graph.traced, graph.placement, {first: 1, second: 0}, ["A", "B"])


def test_a_group_may_not_be_cut() -> None:
    graph = graph_of(Small(lambda m, a: torch.add(*(a @ m.w).chunk(2, 1))), x())
    stage_of = dict.fromkeys(graph.placement.placed, 0)
    stage_of[graph.placement.placed[-1]] = 1
    parts = cut(graph.traced, graph.placement, stage_of, ["A", "B"])
    assert len(parts[0].outputs) == 2
    chunk = next(node for node in graph.placement.placed if node.name == "chunk")
    stage_of = {node: int(node is not chunk and node.name.startswith("getitem")) for node in graph.placement.placed}
    with pytest.raises(CutError, match="shares memory or belongs together"):
        cut(graph.traced, graph.placement, stage_of, ["A", "B"])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)) for _ in range(3)
        )
        self.order = [0, 1, 2]

    def forward(self, a: Tensor) -> Tensor:
        for number in self.order:
            a = self.layers[number](a).relu()
        return a


def _owners(graph: ModelGraph, stage_of: dict[Node, int]) -> dict[str, tuple[int, ...]]:
    owners: dict[str, set[int]] = {}
    for node in graph.placement.placed:
        for attribute in graph.placement.attributes[node]:
            owners.setdefault(graph.traced.attributes[attribute], set()).add(stage_of[node])
    return {name: tuple(sorted(stages)) for name, stages in owners.items()}


def test_the_eval_graph_follows_the_owners_of_the_training_graph() -> None:
    model = Layers()
    graph = graph_of(model, x())
    stage_of = {
        node: int(task.module.split(".")[1]) if task.module else -1
        for task, node in zip(graph.task.ops, graph.nodes.values(), strict=True)
    }
    last = 0
    for node in graph.placement.placed:  # an op of the model itself stays where its input is
        stage_of[node] = last = stage_of[node] if stage_of[node] >= 0 else last
    owners = _owners(graph, stage_of)
    evaluated = graph_of(model.eval(), x())
    found = stages_by_owner(evaluated.traced, evaluated.placement, owners, 3)
    parts = cut(evaluated.traced, evaluated.placement, found, ["A", "B", "C"])
    for number, part in enumerate(parts):
        assert {name.split(".")[1] for name in part.tensors} == {str(number)}
    tensors = [x()]
    assert_same(run_stages(evaluated, model, parts, tensors), run_eager(evaluated, model, tensors), exact=True)


def test_another_order_of_the_layers_cannot_be_cut() -> None:
    model = Layers().eval()
    graph = graph_of(model, x())
    owners = {name: (int(name.split(".")[1]),) for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert stages_by_owner(graph.traced, graph.placement, owners, 3)
    model.order = [0, 2, 1]
    graph = graph_of(model, x())
    told = r"needs layers\.1\.0\.weight, which stages \[1\] of 3 hold, but reads values of stage 2.*torch\.no_grad\(\)"
    with pytest.raises(CutError, match=told):
        stages_by_owner(graph.traced, graph.placement, owners, 3)
    with torch.no_grad():  # as the message says
        graph = graph_of(model, x())
    assert stages_by_owner(graph.traced, graph.placement, owners, 3)


def test_padded_labels_are_recomputed_not_sent() -> None:
    """What is made of inputs alone travels as inputs, to every stage that reads it."""
    function, arguments = INDEPENDENT["padded, shifted"]
    graph = graph_of(Small(function), *(make() for make in arguments))
    assert marks in arguments
    last = graph.placement.placed[-1]
    reads = {source for node in graph.placement.placed for source in graph.placement.reads[node]}
    assert graph.traced.placeholders[1] in reads
    assert last not in graph.placement.recomputed
