"""The user's modules that stages consist of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from plan_graphs import GraphBuilder

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.stage_modules import stage_modules

GPT = (
    "transformer.wte", "transformer.wpe", "",
    "transformer.h.0.ln", "transformer.h.0.attn.proj", "transformer.h.1.ln", "transformer.h.1.attn.proj",
    "transformer.ln_f", "lm_head", "",
)  # fmt: skip
"""The module of each operator; '' is the code of the model itself."""


def graph(modules: Sequence[str]) -> TaskGraph:
    built = GraphBuilder()
    value = built.input()
    for module in modules:
        value = built.op([value], module=module)
    return built.build()


@pytest.mark.parametrize(
    ("cuts", "named"),
    [
        ((), ["transformer..lm_head"]),
        ((3,), ["transformer.wte..wpe", "transformer.h..lm_head"]),
        ((5,), ["transformer.wte..h.0", "transformer.h.1..lm_head"]),
        ((3, 7), ["transformer.wte..wpe", "transformer.h", "transformer.ln_f..lm_head"]),
        ((4, 8), ["transformer.wte..h.0.ln", "transformer.h.0.attn..ln_f", "lm_head"]),
        ((9,), ["transformer..lm_head", ""]),
    ],
)
def test_a_stage_is_named_by_its_first_and_last_module(cuts: Sequence[int], named: list[str]) -> None:
    """The largest module of which no other stage runs a part; what both names begin with is written once."""
    stages = [range(start, end) for start, end in zip((0, *cuts), (*cuts, len(GPT)), strict=True)]
    assert stage_modules(graph(GPT), stages) == named


def test_layers_of_one_list_are_a_range() -> None:
    modules = [f"net.layers.{number}.linear" for number in range(5)] + ["net.head"]
    assert stage_modules(graph(modules), [range(4), range(4, 6)]) == ["net.layers.0..3", "net.layers.4..head"]
