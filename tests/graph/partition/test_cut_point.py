"""CutPoints in models: what segments come of them, what they leave in the graph, and what they change otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pieces import CPU, signature_of
from torch import Tensor, nn

import pyrannc
from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.cut import cut
from rannd.graph.stored.codec import decode, encode
from rannd.graph.tracing.frontend import trace
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.cut_places import cut_places
from rannd.plan.blocks.partitioning import Partitioning

CutPoint = pyrannc.CutPoint


class Cut(nn.Module):
    """Linear layers and CutPoints, and a forward of them."""

    def __init__(self, function: Callable[..., object], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.cut = CutPoint()
        self.other = CutPoint()
        self.inner = inner
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(self, *args)


def graph_of(model: nn.Module, *args: Tensor) -> ModelGraph:
    """The graph, as it is after a way through the cache."""
    signature, tensors = signature_of(model, *args)
    traced, signature = trace(model, signature, tensors, torch.device("cpu"))
    here = build(model, signature, tensors, CPU, traced)
    again, rows = decode(encode(trace(model, signature, tensors, torch.device("cpu"))[0], signature.fixed_rows), model)
    stored = build(model, signature, tensors, CPU, again)
    assert stored.task == here.task
    assert rows is None
    return here


def segments(graph: ModelGraph) -> list[tuple[str, int]]:
    return [(op.target.removeprefix("aten::"), op.segment) for op in graph.task.ops]


X = torch.randn(3, 4)


def loop(m: Cut, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = m.cut(torch.tanh(layer(x)))
    return x


def test_one_module_is_a_place_each_time() -> None:
    graph = graph_of(Cut(loop), X)
    assert segments(graph)[:-1] == [(name, k) for k in range(1, 5) for name in ("linear", "tanh")]
    assert segments(graph)[-1] == ("alias", 4)  # an output
    assert Partitioning.of(graph.task).lost_cut_points == 0


def test_nothing_is_left_of_it_in_the_graph() -> None:
    graph = graph_of(Cut(lambda m, x: m.layers[1](m.cut(m.layers[0](x)))), X)
    assert segments(graph) == [("linear", 1), ("linear", 2)]
    assert graph.idle_cuts == ("CutPoint other has no effect: it is not called",)
    plain = graph_of(Cut(lambda m, x: m.layers[1](m.layers[0](x))), X)
    assert segments(plain) == [("linear", 0), ("linear", 0)]
    moved = graph_of(Cut(lambda m, x: torch.tanh(m.layers[1](m.cut(m.layers[0](x))))), X)
    moved_on = graph_of(Cut(lambda m, x: torch.tanh(m.cut(m.layers[1](m.layers[0](x))))), X)
    digests = {each.task.graph_hash for each in (graph, plain, moved, moved_on)}
    assert len(digests) == 4
    assert graph.task.graph_hash == graph_of(Cut(lambda m, x: m.layers[1](m.other(m.layers[0](x)))), X).task.graph_hash


def test_several_tensors_and_containers_are_one_place() -> None:
    def forward(m: Cut, x: Tensor) -> Tensor:
        a, b = m.layers[0](x), m.layers[1](x)
        a, (b, name), c = m.cut(a, (b, "name"), {"c": a + b})
        assert name == "name"
        return m.layers[2](a) + m.layers[3](b) + c["c"]

    graph = graph_of(Cut(forward), X)
    assert {k for _, k in segments(graph)} == {1, 2}
    assert [k for name, k in segments(graph) if name == "linear"] == [1, 1, 2, 2]


def test_a_cut_of_the_input_or_of_a_mask_divides_nothing() -> None:
    graph = graph_of(Cut(lambda m, x: m.layers[0](m.cut(x))), X)
    assert {op.segment for op in graph.task.ops} == {2}
    assert sum(cut_places(graph.task, make_atoms(graph.task))) == 2


@pytest.mark.parametrize(
    ("function", "copies", "lost"),
    [
        (lambda m, x: m.layers[1](torch.relu_(m.cut(m.layers[0](x)))), 1, 0),
        (lambda m, x: m.layers[1](m.cut(torch.relu_(m.layers[0](x)))), 0, 0),
        (lambda m, x: _kept(m, x), 0, 1),
        (lambda m, x: _views(m, x), 1, 0),
    ],
    ids=["behind", "before", "read later", "a view"],
)
def test_writing_in_place_beside_it(function: Callable[..., Tensor], copies: int, lost: int) -> None:
    model = Cut(function)
    graph = graph_of(model, X)
    assert sum(name == "clone" for name, _ in segments(graph)) == copies
    assert Partitioning.of(graph.task).lost_cut_points == lost
    stage_of = {node: graph.task.ops[number].segment - 1 for number, node in enumerate(graph.nodes.values())}
    if lost:
        return
    parts = cut(graph.traced, graph.placement, stage_of, ["one", "two"])
    state = dict(model.named_parameters())
    values = dict.fromkeys(graph.traced.placeholders, X)
    for part in parts:
        given = [values[node] for node in part.inputs]
        made = part.module(*given, *(state[name] for name in part.tensors), *part.numbers_at(3))
        values.update(zip(part.outputs, made, strict=True))
    torch.testing.assert_close(values[graph.traced.results[0]], model(X))


def _kept(m: Cut, x: Tensor) -> Tensor:
    before = m.layers[0](x)
    after = m.cut(before)
    after.relu_()
    return m.layers[1](after) + before  # which is after.relu_(), too


def _views(m: Cut, x: Tensor) -> Tensor:
    after = m.cut(m.layers[0](x)).view(-1, 2, 2)
    after.mul_(2)
    return m.layers[1](after.reshape(-1, 4))


class Branching(nn.Module):
    """Its code cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.layer(x))
        return x if x.detach().sum().item() > 1e9 else x * x.detach().abs().max().item()


def test_cut_points_without_effect_are_told() -> None:
    def forward(m: Cut, x: Tensor) -> Tensor:
        x = m.layers[0](m.inner(m.layers[1](m.other(m.layers[2](x)))))
        with torch.no_grad():
            mask = m.cut(x * 2).relu()
        return x + mask

    graph = graph_of(Cut(forward, Branching()), X)
    assert graph.idle_cuts == (
        "CutPoint cut has no effect: it is called under no_grad or autocast, which cannot be cut",
        "CutPoint inner.cut has no effect: module inner runs as one operator",
    )
    assert len({op.segment for op in graph.task.ops}) == 2


def test_strict_export_shows_it_too() -> None:
    def forward(m: Cut, x: Tensor) -> Tensor:
        x = m.layers[0](x)
        if x.shape[0] == 3:  # fixes the batch
            x = x + 1
        return m.layers[1](m.cut(x))

    signature, tensors = signature_of(Cut(forward), X)
    model = Cut(forward)
    traced, fixed = trace(model, signature, tensors, torch.device("cpu"))
    assert [op.segment for op in build(model, fixed, tensors, CPU, traced).task.ops if op.target == "aten::linear"] == [
        1,
        2,
    ]
    program = torch.export.export(model, (X,), strict=True)
    assert [node.name for node in program.graph.nodes if operator_name(node.target) == "aten::alias"] == ["alias"]


def test_alone_it_is_the_identity() -> None:
    cut_point = CutPoint()
    x = torch.randn(2, requires_grad=True)
    assert cut_point(x) is x
    assert cut_point(x, None, 3) == (x, None, 3)
    model = Cut(loop)
    plain = x.new_ones(3, 4).requires_grad_()
    model(plain).sum().backward()
    assert plain.grad is not None
    assert not list(cut_point.parameters())
    assert torch.equal(torch.compile(cut_point, backend="eager")(x), x)
