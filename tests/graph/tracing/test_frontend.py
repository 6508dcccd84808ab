"""The traced graph: what it reads, what it hands back, what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from leaf_models import Outer
from pieces import Small, assert_same, eager, graph_of, in_pieces, signature_of, weights_of
from thinned import one_in
from torch import Tensor, nn

from rannd.errors import TraceError
from rannd.graph.fx.traced import Traced, operator_name
from rannd.graph.modules.autograd_functions import function_path
from rannd.graph.partition.cut import extract
from rannd.graph.tracing.export import DROPPED
from rannd.graph.tracing.frontend import trace


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    signature, tensors = signature_of(model, *args, **kwargs)
    return trace(model, signature, tensors, torch.device("cpu"))[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.inner[0].weight
        self.idle = nn.Linear(2, 2)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(ids) * self.scale)


def test_one_placeholder_for_each_tensor() -> None:
    found = traced(Small(lambda m, a, *, b, n: a @ m.w * b["c"] * n), torch.randn(3, 6), b={"c": torch.randn(6)}, n=2)
    assert len(found.placeholders) == 2


def test_an_argument_nobody_reads_keeps_its_placeholder() -> None:
    found = traced(Small(lambda m, a, b: a @ m.w), torch.randn(3, 6), torch.randn(3, 6))
    assert [len(node.users) > 0 for node in found.placeholders] == [True, False]


def test_reads_the_users_own_parameters() -> None:
    model = Tied()
    found = traced(model, torch.randint(0, 9, (3, 4)))
    own = {id(p): name for name, p in model.named_parameters()}
    state = {found.attributes[node]: found.tensor(node) for node in found.attributes if found.is_state(node)}
    assert set(state) == {"inner.0.weight", "inner.1.weight", "inner.1.bias"}
    assert {name: own[id(tensor)] for name, tensor in state.items()} == {name: name for name in state}


def test_reads_the_users_own_buffers() -> None:
    model = Small(lambda m, a: a + m.running)
    found = traced(model, torch.randn(3, 6))
    (node,) = found.attributes
    assert found.attributes[node] == "running"
    assert found.tensor(node) is model.running
    assert found.is_state(node)
    assert not found.is_parameter(node)
    assert not found.trainable(node)


def test_other_tensors_become_constants() -> None:
    found = traced(Tied(), torch.randint(0, 9, (3, 4)))
    ((name, value),) = found.constants.items()
    assert name.startswith("constant:")
    assert value.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_frozen_parameter_is_not_trainable() -> None:
    model = Small(lambda m, a: a @ m.w)
    model.w.requires_grad_(False)
    found = traced(model, torch.randn(3, 6))
    (node,) = found.attributes
    assert found.is_parameter(node)
    assert not found.trainable(node)


def test_outputs_keep_their_structure() -> None:
    model = Small(lambda m, a: {"y": [a @ m.w, None], "n": (3, "text", m.b), "again": a})
    found = traced(model, torch.randn(3, 6))
    assert sorted(found.outputs.constants.values(), key=repr) == ["text", 3, None]
    numbered = {place: f"value {place}" for place in range(len(found.results))}
    output = found.outputs.unflatten(list(numbered.values()))
    assert list(output) == ["y", "n", "again"]
    assert output["y"][1] is None
    assert output["n"][:2] == (3, "text")


def test_every_output_is_an_op_of_its_own() -> None:
    model = Small(lambda m, a: (lambda y: (y, y, a, m.b))(a @ m.w))
    found = traced(model, torch.randn(3, 6))
    assert len(set(found.results)) == 4
    assert all(node.op == "call_function" for node in found.results)


def test_checks_of_export_are_dropped() -> None:
    model = Small(lambda m, a: (a @ m.w).to(torch.float64).to(torch.float32))
    found = traced(model, torch.randn(3, 6))
    assert not [node for node in found.graph.nodes if operator_name(node.target) in DROPPED]


@pytest.mark.parametrize("rows", [0, 1, 6, 9])
def test_any_number_of_rows_traces_the_same(rows: int) -> None:
    """Also one row, none, and as many as another dimension has."""
    torch.manual_seed(0)
    model = Small(lambda m, a: F.relu(a @ m.w).sum(1))
    graph = graph_of(model, torch.randn(rows, 6))
    assert graph.task.graph_hash == graph_of(model, torch.randn(4, 6)).task.graph_hash
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    for count in (1, 3, 6):
        a = torch.randn(count, 6)
        values = dict(zip(graph.traced.placeholders, [a, *weights_of(graph, [a], count, count)], strict=True))
        (found,) = part.module(*(values[n] for n in part.inputs), model.w, *part.numbers_at(count))
        torch.testing.assert_close(found, model(a))


@pytest.mark.parametrize("inside", [False, True])
def test_a_first_call_in_inference_mode_is_exported(inside: bool) -> None:
    """Also one whose code reads sizes: what is made in inference mode does not count its changes."""
    model = Small(lambda m, a: torch.relu(a @ m.w + torch.arange(a.shape[1])))
    outside = torch.randn(3, 6)
    with torch.inference_mode():
        assert traced(model, torch.randn(3, 6) if inside else outside).record == ()


class Deciding(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        if a.sum() > 0:  # the line that is named
            return a
        return -a


def _line(text: str) -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_data_dependent_code_is_named_and_becomes_a_leaf() -> None:
    found = traced(Outer(Deciding()), torch.randn(3, 6))
    assert found.leaf_paths == ("blocks.1",)
    assert "module blocks.1 (Deciding)" in found.record[0]
    assert f"{__file__}:{_line('the line that is named')}" in found.record[0]
    assert found.record[1] == "module blocks.1 (Deciding) runs as one operator"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Doubling(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return Doubled.apply(a)  # the call that is named


def test_modules_with_custom_functions_are_named_and_become_leaves() -> None:
    found = traced(Outer(Doubling()), torch.randn(3, 6))
    assert found.leaf_paths == (function_path(Doubled),)
    assert "module blocks.1 (Doubling)" in found.record[0]
    assert "Doubled" in found.record[0]
    assert f"{__file__}:{_line('the call that is named')}" in found.record[0]
    assert Doubled.apply(torch.ones(1)).item() == 2  # they still work elsewhere


@pytest.mark.parametrize(
    "function",
    one_in(
        3,
        [
            lambda m, a: (a @ m.w)[:4],
            lambda m, a: a @ m.w if a.shape[0] < 100 else a,
            lambda m, a: (a @ m.w)[:1_000_000],
            lambda m, a: a @ m.w if a.shape[0] % 2 else a,
            lambda m, a: m.lstm(a[None])[0][0],
            lambda m, a: a + m.table.weight[: a.shape[0]],
        ],
    ),
    ids=["first rows", "branch", "a million rows", "odd or even", "rows as time", "positions"],
)
def test_a_fixed_batch_gets_a_graph_for_its_size(function: Any) -> None:
    graph = graph_of(Small(function), torch.randn(8, 6))
    assert graph.traced.leaf_paths or graph.signature.fixed_rows == 8
    assert "batch dimension of argument 0 is fixed by the model's code to" in graph.traced.record[0]
    assert graph.traced.record[-1] in (
        "exported for 8 rows; each other batch size needs another graph",
        "module lstm (LSTM) runs as one operator",
    )


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda m, a, places: a + m.table(places), [(8, 8, 6), ()]),
        (lambda m, mask, a: torch.softmax(a @ a.mT + mask, -1) @ a @ m.w, [(8, 8), (8, 8, 6)]),
    ],
    ids=["positions", "mask"],
)
@pytest.mark.usefixtures("double")
def test_what_is_as_long_as_the_batch_by_chance_goes_along_whole(function: Any, shapes: list[tuple[int, ...]]) -> None:
    model = Small(function)
    arguments = [torch.randn(shape) if shape else torch.arange(8) for shape in shapes]
    graph = graph_of(model, *arguments)
    assert graph.signature.fixed_rows is None
    assert graph.traced.leaf_paths == ()
    assert len(graph.traced.whole) == 1
    assert [spec.shape for spec in graph.signature.tensors if not spec.batch] in ([(8,)], [(8, 8)])
    assert "also has size 8 in dimension 0, but carries no samples" in graph.traced.record[0]
    assert_same(in_pieces(graph, model, arguments, [3, 5]), eager(graph, model, arguments))


@pytest.mark.usefixtures("double")
def test_a_model_that_needs_more_rows_than_an_example_has_gets_a_graph_for_its_own() -> None:
    model = Small(lambda m, a: (a @ m.w).square().mean(1).topk(4).values.mean())
    tensors = [torch.randn(8, 6)]
    graph = graph_of(model, *tensors)
    assert graph.signature.fixed_rows == 8
    assert graph.traced.leaf_paths == ()
    assert "traced for 8 rows, each other batch size needs another graph" in graph.traced.record[0]
    assert_same(in_pieces(graph, model, tensors, [8]), eager(graph, model, tensors))


def test_a_model_that_fails_for_its_own_rows_fails() -> None:
    with pytest.raises(TraceError, match="fails"):
        graph_of(Small(lambda m, a: (a @ m.w).mean(1).topk(9).values), torch.randn(8, 6))


@pytest.mark.parametrize("size", [5, 100])
def test_a_single_size_that_is_treated_differently_is_a_hole(size: int) -> None:
    model = Small(lambda m, a: a @ m.w if a.shape[0] != size else a * m.b)
    graph = graph_of(model, torch.randn(8, 6))
    assert graph.traced.holes == (size,)
    assert graph.signature.fixed_rows is None
    assert graph.traced.leaf_paths == ()
    graph = graph_of(model, torch.randn(size, 6))
    assert graph.signature.fixed_rows == size
    assert [node.target for node in graph.nodes.values()] == [torch.ops.aten.mul.Tensor]


def test_a_choice_among_kernels_does_not_fix_the_batch() -> None:
    """cdist takes another kernel for more than 25 rows."""
    found = traced(Small(lambda m, a: torch.cdist(a, a @ m.w).amin(1)), torch.randn(8, 6))
    assert found.results


class Strange:
    pass


def test_a_strange_output_is_dropped_and_named() -> None:
    found = traced(Small(lambda m, a: (a, Strange())), torch.randn(3, 6))
    assert found.outputs.unflatten([1]) == (1, None)
    assert found.record == ("[1] (test_frontend.Strange) of the output cannot be returned by ranks and becomes None",)


def test_a_model_without_tensor_output_is_refused() -> None:
    with pytest.raises(TraceError, match="returns no tensor"):
        traced(Small(lambda m, a: {"a": None}), torch.randn(3, 6))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        print("the model speaks")
        return a @ m.w

    def needs_rows(m: Any, a: Tensor) -> Tensor:
        print(f"called with {a.shape[0]} rows")
        warnings.warn("of a call that the script did not make", stacklevel=1)
        return (a @ m.w).mean(1).topk(4).values.mean()

    traced(Small(forward), torch.randn(3, 6))
    traced(Outer(Deciding()), torch.randn(3, 6))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        traced(Small(needs_rows), torch.randn(8, 6))
    assert capfd.readouterr() == ("", "")
    assert not warned
