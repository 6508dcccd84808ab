"""Structural hashes of ops and blocks: equal for equal layers, different for anything that changes what they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layered_model import Model, model_graph
from pieces import Small, graph_of
from thinned import first
from torch import Tensor, nn
from zoo import ZOO

from rannd.graph.fx.ir import Op, Param, Size, TaskGraph, Value
from rannd.graph.model import ModelGraph
from rannd.graph.partition.block_hash import block_hash, block_hashes


def layers_of(task: TaskGraph, path: str = "layers") -> list[list[int]]:
    """Ops of each layer: of each member of the list of modules at `path` (a pattern)."""
    found: dict[str, list[int]] = {}
    for number, op in enumerate(task.ops):
        at = re.match(rf"{path}\.\d+(?=\.|$)", op.module)
        if at:
            found.setdefault(at.group(), []).append(number)
    return list(found.values())


def layer_hashes(graph: ModelGraph) -> list[str]:
    return block_hashes(graph.task, layers_of(graph.task))


def test_equal_layers_have_equal_hashes() -> None:
    graph = model_graph(layers=3)
    assert len(layer_hashes(graph)) == 3
    assert len(set(layer_hashes(graph))) == 1
    assert set(layer_hashes(graph)) == set(layer_hashes(model_graph(seed=9, rows=6, layers=2)))


@pytest.mark.parametrize("change", [{"width": 16}, {"p": 0.3}, {"eps": 1e-3}, {"time": 7}], ids=str)
def test_other_layers_have_other_hashes(change: dict[str, Any]) -> None:
    assert set(layer_hashes(model_graph())).isdisjoint(layer_hashes(model_graph(**change)))


def test_frozen_weights_have_hashes_of_their_own() -> None:
    """Their backward costs less."""
    model = Model()
    model.layers[1].requires_grad_(False)
    first, second = layer_hashes(graph_of(model, torch.randint(0, 11, (4, 5))))
    assert first == layer_hashes(model_graph())[0]
    assert second != first


def test_modes_and_types_have_hashes_of_their_own() -> None:
    ids = torch.randint(0, 11, (4, 5))
    found = [model_graph(), graph_of(Model().eval(), ids), graph_of(Model().double(), ids)]
    with torch.no_grad():
        found.append(graph_of(Model(), ids))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(graph_of(Model(), ids))
    assert len({layer_hashes(graph)[0] for graph in found}) == len(found)


def _hugging_face(name: str, config: str, model: str, count: str, path: str) -> Any:
    """A model of the zoo with another number of layers."""
    entry = next(entry for entry in ZOO if entry.name == name)

    def build(layers: int) -> nn.Module:
        import transformers

        settings = entry.build().config.to_dict() | {count: layers, "layer_types": None}
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.to(entry.dtype).train()

    return pytest.param(entry, build, path, id=name)


@pytest.mark.parametrize(
    ("entry", "build", "path"),
    first(
        2,
        [
            _hugging_face("gpt2", "GPT2Config", "GPT2LMHeadModel", "n_layer", r"transformer\.h"),
            _hugging_face("bert", "BertConfig", "BertForMaskedLM", "num_hidden_layers", r"bert\.encoder\.layer"),
            _hugging_face(
                "vit", "ViTConfig", "ViTForImageClassification", "num_hidden_layers", r"vit\.(encoder\.)?layers?"
            ),
            _hugging_face("llama", "LlamaConfig", "LlamaForCausalLM", "num_hidden_layers", r"model\.layers"),
            _hugging_face("mixtral", "MixtralConfig", "MixtralForCausalLM", "num_hidden_layers", r"model\.layers"),
        ],
    ),
)
def test_deeper_models_have_the_same_structures(entry: Any, build: Callable[[int], nn.Module], path: str) -> None:
    seen: list[set[str]] = []
    ops: list[set[str]] = []
    for layers in (2, 4):
        with entry.precision():
            graph = graph_of(build(layers), **entry.batch(4))
        blocks = layers_of(graph.task, path)
        assert len(blocks) == layers
        seen.append(set(block_hashes(graph.task, blocks)))
        ops.append({op.hash for op in graph.task.ops})
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]
    assert ops[1] == ops[0]


# -- single ops -----------------------------------------------------------------------------------------------


def hashes_of(function: Callable[..., Any], *args: Any) -> list[str]:
    torch.manual_seed(0)
    return [op.hash for op in graph_of(Small(function), *args).task.ops]


X = torch.randn(4, 6)
"""A batch."""


def _no_grad(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        held = torch.relu(x @ model.w)
    return held + model.b


def _no_grad_other(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        held = torch.tanh(x @ model.w)
    return held + model.b


@pytest.mark.parametrize(
    ("first", "second", "args"),
    [
        (lambda m, x: x @ m.w * 2.0, lambda m, x: x @ m.w * 3.0, (X,)),
        (lambda m, x: torch.sub(x @ m.w, x), lambda m, x: torch.sub(x, x @ m.w), (X,)),
        (lambda m, x: (x @ m.w).sum(1), lambda m, x: (x @ m.w).sum(0), (X,)),
        (lambda m, x: x @ m.w + m.b, lambda m, x: x @ m.w + m.running, (X,)),
        (lambda m, x: x @ m.w + m.b, lambda m, x: x @ m.w + m.b.detach(), (X,)),
        (lambda m, x: x @ m.w, lambda m, x: x @ m.w.detach(), (X,)),
        (lambda m, x: (x @ m.w).masked_fill(x > 0, 0), lambda m, x: (x @ m.w).masked_fill(x > 1, 0), (X,)),
        (lambda m, x: x @ m.w.t().relu(), lambda m, x: x @ m.w.t().tanh(), (X,)),
        (_no_grad, _no_grad_other, (X,)),
    ],
    ids=["number", "order", "dimension", "buffer", "detached", "detached alone", "mask", "weight", "region"],
)
def test_ops_differ(first: Any, second: Any, args: Any) -> None:
    """Also where the difference is in what is recomputed for the op, or in a region of its own."""
    assert hashes_of(first, *args) != hashes_of(second, *args)


def test_values_do_not_matter_nor_where_they_come_from() -> None:
    """Not the seed, not the batch, not which parameter of a shape, not the names."""
    once = hashes_of(lambda m, x: x @ m.w, X)
    assert hashes_of(lambda m, x: x @ m.w, torch.randn(7, 6)) == once
    twice = hashes_of(lambda m, x: torch.relu(x @ m.w) @ m.w, X)
    assert twice[2] != twice[0]  # what it reads has a gradient
    thrice = hashes_of(lambda m, x: torch.relu(torch.relu(x @ m.w) @ m.w) @ m.table.weight[:6], X)
    assert thrice[2] == twice[2]


def test_sizes_that_tracing_counts_through_the_model_do_not_matter() -> None:
    def select(model: Small, x: Tensor) -> Tensor:
        a = x @ model.w
        for _ in range(2):
            a = a + a[a[:, 0] > 0].sum(0)
        return a

    graph = graph_of(Small(select), X).task
    found: dict[str, list[str]] = {}
    for op in graph.ops:
        found.setdefault(op.target, []).append(op.hash)
    twice = {target: hashes for target, hashes in found.items() if len(hashes) == 2}
    assert "aten::index.Tensor" in twice
    assert all(len(set(hashes)) == 1 for hashes in twice.values()), twice


@pytest.mark.long
def test_what_an_op_reads_is_what_placement_says() -> None:
    for name in ("t5", "swin", "mamba"):
        entry = next(entry for entry in ZOO if entry.name == name)
        with entry.precision():
            graph = graph_of(entry.build(), **entry.batch(4))
        for op, node in zip(graph.task.ops, graph.nodes.values(), strict=True):
            read = {graph.task.values[value].name for value in op.inputs}
            assert read == {source.name for source in graph.placement.reads[node]}
            held = {graph.task.params[param].name for param in op.params}
            assert held == {graph.traced.attributes[source] for source in graph.placement.attributes[node]}


# -- wiring, on task graphs made for it -----------------------------------------------------------------------

KINDS = ("aten::linear", "aten::add", "aten::relu")


@st.composite
def blocks(draw: st.DrawFn) -> tuple[TaskGraph, tuple[int, ...]]:
    """A small graph and a run of its ops that all are used."""
    count = draw(st.integers(2, 6))
    values = [Value("input", -1, Size(0, 8), draw(st.booleans()))]
    params = [Param(f"p{n}", draw(st.integers(1, 9)), draw(st.booleans()), draw(st.booleans())) for n in range(3)]
    ops = []
    for number in range(count):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        held = draw(st.lists(st.integers(0, len(params) - 1), max_size=2, unique=True))
        target = draw(st.sampled_from(KINDS))
        ops.append(Op(f"{number}", target, target, tuple(inputs), (len(values),), tuple(held), Size(0, 9), number))
        size = Size(draw(st.integers(0, 3)), draw(st.integers(1, 9)))
        values.append(Value(f"v{number}", number, size, draw(st.booleans()), draw(st.booleans())))
    first = draw(st.integers(0, count - 1))
    members = tuple(range(first, draw(st.integers(first, count - 1)) + 1))
    return TaskGraph("hash", tuple(ops), tuple(values), tuple(params), False), members


def changed(task: TaskGraph, field: str, number: int, **new: Any) -> TaskGraph:
    items = list(getattr(task, field))
    items[number] = msgspec.structs.replace(items[number], **new)
    return msgspec.structs.replace(task, **{field: tuple(items)})


def embedded(task: TaskGraph, before: int) -> TaskGraph:
    """The same graph, behind other ops and parameters, under other names."""
    values = [Value(f"before{n}", n - 1, Size(0, 3 + n), False) for n in range(before)]
    ops = [Op(f"b{n}", "aten::tanh", "tanh", (n,), (n + 1,), (n,), Size(1), n) for n in range(before - 1)]
    params = [Param(f"q{n}", 5, True) for n in range(before)]
    for value in task.values:
        made = value.producer + len(ops) if value.producer >= 0 else -1
        values.append(msgspec.structs.replace(value, name=f"other {value.name}", producer=made))
    moved = [
        msgspec.structs.replace(
            op,
            name=f"other {op.name}",
            module="elsewhere",
            group=op.group + 100,
            inputs=tuple(index + before for index in op.inputs),
            outputs=tuple(index + before for index in op.outputs),
            params=tuple(index + before for index in op.params),
        )
        for op in task.ops
    ]
    params += [msgspec.structs.replace(param, name=f"other {param.name}") for param in task.params]
    return TaskGraph("another", (*ops, *moved), tuple(values), tuple(params), False)


@given(blocks(), st.integers(1, 4))
def test_neither_names_nor_places_matter(block: tuple[TaskGraph, tuple[int, ...]], before: int) -> None:
    task, members = block
    moved = [number + before - 1 for number in members]
    assert block_hash(embedded(task, before), reversed(moved)) == block_hash(task, members)


@given(st.data(), blocks())
def test_every_change_of_an_op_a_wire_or_a_size_matters(
    data: st.DataObject, block: tuple[TaskGraph, tuple[int, ...]]
) -> None:
    task, members = block
    number = data.draw(st.sampled_from(members))
    op = task.ops[number]
    value = data.draw(st.sampled_from((*op.inputs, *op.outputs)))
    size = task.values[value].bytes
    changes: list[TaskGraph] = [
        changed(task, "ops", number, hash="another"),
        changed(task, "ops", number, flops=op.flops + Size(0, 0, 1)),
        changed(task, "values", value, bytes=size + Size(1)),
        changed(task, "values", value, bytes=Size(size.c0, size.c1, size.c2 + 1)),
        changed(task, "values", value, requires_grad=not task.values[value].requires_grad),
    ]
    for param in op.params:
        held = task.params[param]
        changes += [
            changed(task, "params", param, bytes=held.bytes + 1),
            changed(task, "params", param, trainable=not held.trainable),
            changed(task, "params", param, buffer=not held.buffer),
        ]
    if any(reader.inputs.count(op.outputs[0]) for reader in task.ops[members[-1] + 1 :]):
        cut_off = task
        for index, reader in enumerate(task.ops[members[-1] + 1 :], members[-1] + 1):
            left = tuple(read for read in reader.inputs if read != op.outputs[0])
            cut_off = changed(cut_off, "ops", index, inputs=left)
        if not task.values[op.outputs[0]].is_output:
            changes.append(cut_off)  # nothing leaves any more
    for other in changes:
        assert block_hash(other, members) != block_hash(task, members)


@given(blocks())
def test_every_wire_matters(block: tuple[TaskGraph, tuple[int, ...]]) -> None:
    """An op that reads another op of its block, or the same ones in another order, makes another block."""
    task, _ = block
    members = range(len(task.ops))
    expected = block_hash(task, members)
    for number in members[1:]:
        read = task.ops[number].inputs
        made = [0, *(task.ops[each].outputs[0] for each in range(number))]
        rewired = {
            (*read[:place], other, *read[place + 1 :])
            for place in range(len(read))
            for other in made
            if other not in read
        }
        if len(read) > 1:
            rewired.add(read[::-1])
        for inputs in rewired:
            assert block_hash(changed(task, "ops", number, inputs=inputs), members) != expected


def _shared(first: Sequence[int], second: Sequence[int]) -> TaskGraph:
    params = tuple(Param(f"p{n}", 4, True) for n in range(2))
    values = tuple(Value(f"v{n}", n - 1, Size(0, 4), True, n == 2) for n in range(3))
    ops = (
        Op("0", KINDS[0], "linear", (0,), (1,), tuple(first), Size(0, 9), 0),
        Op("1", KINDS[0], "linear", (1,), (2,), tuple(second), Size(0, 9), 1),
    )
    return TaskGraph("hash", ops, values, params, False)


def test_a_shared_parameter_is_not_two_parameters() -> None:
    """Its gradients are summed, and it takes its memory once."""
    tied, apart = _shared([0], [0]), _shared([0], [1])
    assert block_hash(tied, (0, 1)) != block_hash(apart, (0, 1))
    assert block_hash(tied, (0,)) == block_hash(tied, (1,)) == block_hash(apart, (1,))
