from __future__ import annotations

import math
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_graphs import GraphBuilder, chain, task_graphs, transformer

from rannd.errors import PlanError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.grains import make_grains
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.plan_options import PlanOptions


def shapes(graph: TaskGraph, blocks: tuple[Block, ...]) -> list[tuple[str, ...]]:
    return [tuple(graph.ops[op].target for op in block.ops) for block in blocks]


def test_the_tutorial_s_ten_layers_are_ten_blocks() -> None:
    assert make_blocks(Partitioning.of(chain(10)), PlanOptions(), world=2) == tuple(
        Block(ops=(op,)) for op in range(10)
    )


def test_equal_layers_give_equal_blocks() -> None:
    graph = transformer(24)
    blocks = make_blocks(Partitioning.of(graph), PlanOptions(), world=4)
    assert 16 <= len(blocks) <= 32
    kinds = Counter(shapes(graph, blocks[1:-1]))
    assert len(kinds) <= 3, kinds


def test_cuts_are_at_the_residual_stream() -> None:
    graph = transformer(24)
    for block in make_blocks(Partitioning.of(graph), PlanOptions(), world=4)[1:-1]:
        made_before = {
            value for op in block.ops for value in graph.ops[op].inputs if graph.values[value].producer not in block.ops
        }
        assert len(made_before) == 1


def test_uncoarsening_moves_a_cut_to_the_cheaper_place() -> None:
    builder = GraphBuilder()
    value = builder.input(0)
    for size in (10, 40, 1, 40, 10, 10):
        value = builder.op([value], size=size, flops=16_000)
    graph = builder.build()

    def cut(*, uncoarsen: bool) -> list[tuple[int, ...]]:
        options = PlanOptions(max_partition_num=2, min_partition_num=2, do_coarsening=False, do_uncoarsening=uncoarsen)
        return [block.ops for block in make_blocks(Partitioning.of(graph), options, world=2)]

    assert cut(uncoarsen=False) == [(0, 1, 2, 3), (4, 5)]
    assert cut(uncoarsen=True) == [(0, 1, 2), (3, 4, 5)]


def test_balance_by_time_or_by_bytes() -> None:
    builder = GraphBuilder()
    value = builder.input(0)
    for flops in (1_000_000, 10, 10, 10):
        value = builder.op([value], size=10, flops=flops)
    graph = builder.build()

    def cut(*, by_time: bool) -> list[tuple[int, ...]]:
        options = PlanOptions(max_partition_num=2, min_partition_num=2, do_coarsening=False, coarsen_by_time=by_time)
        return [block.ops for block in make_blocks(Partitioning.of(graph), options, world=2)]

    assert cut(by_time=True) == [(0,), (1, 2, 3)]
    assert cut(by_time=False) == [(0, 1), (2, 3)]


def test_five_thousand_ops_take_seconds_at_most() -> None:
    graph = transformer(333)
    began = time.process_time()
    assert 28 <= len(make_blocks(Partitioning.of(graph), PlanOptions(), world=8)) <= 32
    assert time.process_time() - began < 10


@pytest.mark.parametrize("layers", [72, 100, 144, 333])
def test_equal_layers_that_do_not_divide_evenly_make_no_pairs(layers: int) -> None:
    """As many blocks as there can be, and yet none with more layers than it needs."""
    graph = transformer(layers)
    each = len(graph.ops) / layers
    sizes = [len(block.ops) / each for block in make_blocks(Partitioning.of(graph), PlanOptions(), world=8)]
    assert max(sizes) < math.ceil(layers / 32) + 0.6
    assert len(sizes) > 20


def test_more_stages_than_max_partition_num_still_get_their_blocks() -> None:
    blocks = make_blocks(Partitioning.of(chain(50)), PlanOptions(partition_num=40), world=40)
    assert len(blocks) == 40


def test_a_graph_without_ops_is_refused() -> None:
    with pytest.raises(PlanError, match="no op to place"):
        make_blocks(Partitioning.of(GraphBuilder().build()), PlanOptions(), world=1)


@given(
    task_graphs(max_ops=25),
    st.integers(1, 6),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 6),
)
def test_blocks_are_ordered_complete_and_as_many_as_asked(
    graph: TaskGraph, low: int, more: int, coarsen: bool, uncoarsen: bool, world: int, stages: int
) -> None:
    options = PlanOptions(
        min_partition_num=low,
        max_partition_num=low + more,
        do_coarsening=coarsen,
        do_uncoarsening=uncoarsen,
        partition_num=stages,
    )
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    assert sorted(op for block in blocks for op in block.ops) == list(range(len(graph.ops)))
    place = {op: index for index, block in enumerate(blocks) for op in block.ops}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            producer = graph.values[value].producer
            assert producer < 0 or place[producer] <= place[index]
    for atom in make_atoms(graph):
        assert len({place[op] for op in atom}) == 1
    most = max(low + more, stages)
    assert len(blocks) <= most
    atoms = make_atoms(graph)
    assert len(blocks) >= min(len(atoms), most, max(world, stages))
    assert len(blocks) >= min(len(make_grains(graph, atoms)), most, low)
