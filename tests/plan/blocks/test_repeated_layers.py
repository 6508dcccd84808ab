"""What is compiled together: repeated layers, whatever a model's depth."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from plan_graphs import GraphBuilder, chain, task_graphs, transformer

from rannd.graph.fx.ir import TaskGraph
from rannd.graph.partition.block_hash import block_hashes
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.blocks.repeated_layers import MOST_LAYERS, PARTS, with_layers


def layers(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    return with_layers(Partitioning.of(graph)).grains


@pytest.mark.parametrize("depth", [2, 5, 24])
def test_a_transformer_has_few_kinds(depth: int) -> None:
    graph = transformer(depth)
    kinds = Counter(block_hashes(graph, layers(graph)))
    assert len(kinds) <= 4
    assert max(kinds.values()) >= depth - 2


def test_layers_are_cut_at_the_residual_stream() -> None:
    graph = transformer(12)
    for ops in layers(graph)[1:-1]:
        read = {value for op in ops for value in graph.ops[op].inputs if graph.values[value].producer not in ops}
        assert len(read) == 1


def test_many_equal_operators_make_few_layers() -> None:
    found = layers(chain(100))
    assert len(found) <= MOST_LAYERS
    assert len({len(ops) for ops in found[1:-1]}) <= 2


def test_what_repeats_nothing_is_divided_by_weight() -> None:
    builder = GraphBuilder()
    value = builder.input()
    for number in range(60):
        value = builder.op([value], params=[builder.param(1000)], size=1000 + number, target=f"aten::op{number}")
    assert PARTS / 2 <= len(layers(builder.build())) <= 2 * PARTS


@given(task_graphs())
def test_every_operator_is_in_one_layer_and_layers_are_in_order(graph: TaskGraph) -> None:
    found = layers(graph)
    assert sorted(op for ops in found for op in ops) == list(range(len(graph.ops)))
    place = {op: number for number, ops in enumerate(found) for op in ops}
    for number, ops in enumerate(found):
        for op in ops:
            for value in graph.ops[op].inputs:
                producer = graph.values[value].producer
                assert producer < 0 or place[producer] <= number
