"""Equal layers that follow each other are one line of the graph."""

from __future__ import annotations

import msgspec
from shown_plans import planned

from rannd.plan.deployment import OpTable
from rannd.runner.page.layer_folding import folded


def table(*ops: tuple[str, str, int]) -> OpTable:
    """A table of operators: module, operator of torch, bytes of parameters."""
    texts = tuple(dict.fromkeys(["", *(module for module, _, _ in ops), *(target for _, target, _ in ops)]))
    zeros = (0,) * len(ops)
    return OpTable(
        texts=texts,
        targets=tuple(texts.index(target) for _, target, _ in ops),
        modules=tuple(texts.index(module) for module, _, _ in ops),
        sources=zeros,
        dtypes=zeros,
        blocks=zeros,
        flops=(3,) * len(ops),
        param_bytes=tuple(size for *_, size in ops),
        output_bytes=zeros,
    )


def told(made: OpTable, first: int = 0) -> list[tuple[str, int, int, int]]:
    return [(each.name, each.count, each.first, each.ops) for each in folded(made, first, len(made.targets))]


def test_equal_layers_are_one() -> None:
    layers = [(f"h.{number}.{name}", "aten::linear", 8) for number in range(3) for name in "ab"]
    made = table(("wte", "aten::embedding", 5), *layers, ("head", "aten::linear", 8))
    assert told(made) == [("wte", 1, 0, 1), ("h.0..2", 3, 1, 2), ("head", 1, 7, 1)]
    layer = folded(made, 0, len(made.targets))[1]
    assert (layer.flops, layer.param_bytes) == (18, 48)


def test_a_layer_of_another_size_or_operator_begins_anew() -> None:
    linear = [(f"h.{number}.a", "aten::linear", size) for number, size in enumerate((8, 8, 9))]
    made = table(*linear, ("h.3.a", "aten::mul", 9))
    assert told(made) == [("h.0..1", 2, 0, 1), ("h.2", 1, 2, 1), ("h.3", 1, 3, 1)]


def test_layers_of_other_lists_are_others() -> None:
    made = table(("encoder.0", "aten::linear", 8), ("decoder.1", "aten::linear", 8), ("decoder.2", "aten::linear", 8))
    assert told(made) == [("encoder.0", 1, 0, 1), ("decoder.1..2", 2, 1, 1)]


def test_operators_of_the_model_itself_are_no_layers() -> None:
    made = table(("", "aten::add", 0), ("", "aten::add", 0), ("h.0", "aten::linear", 8))
    assert told(made) == [("the model itself", 1, 0, 2), ("h.0", 1, 2, 1)]


def test_layers_and_what_is_called_after_each_are_folded_together() -> None:
    pairs = [(module, name, 8) for n in range(5) for module, name in ((f"h.{n}", "aten::linear"), ("", "aten::relu"))]
    made = table(*pairs, ("", "aten::mean", 0))
    assert told(made) == [
        ("h.0..3 and the model itself", 4, 0, 2),
        ("h.4", 1, 8, 1),
        ("the model itself", 1, 9, 2),
    ]
    assert folded(made, 0, 11)[0].param_bytes == 64
    assert told(made, 1)[:2] == [("the model itself", 1, 1, 1), ("h.1..3 and the model itself", 3, 2, 2)]
    other = table(*pairs[:3], ("", "aten::gelu", 8), *pairs[4:6])
    assert [count for _, count, _, _ in told(other)] == [1] * 6


def test_a_part_of_a_stage_begins_where_the_stage_does() -> None:
    made = table(*((f"h.{number}", "aten::linear", 8) for number in range(4)))
    assert told(made, 2) == [("h.2..3", 2, 2, 1)]


def test_all_operators_of_a_plan_are_in_a_layer_once() -> None:
    plan = planned(partition_num=2)
    found = plan.table
    assert found is not None
    first = 0
    for stage in plan.stages:
        layers = folded(found, first, first + len(stage.ops))
        assert sum(each.count * each.ops for each in layers) == len(stage.ops)
        assert layers[0].first == first
        first += len(stage.ops)
    assert max(each.count for each in folded(found, 0, len(plan.stages[0].ops))) > 1
    assert all(each.source.startswith("models/net.py:") for each in layers)
    assert msgspec.json.encode(layers)
