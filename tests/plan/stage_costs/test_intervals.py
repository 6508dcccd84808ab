"""Sums over runs of blocks against what a run's blocks say one by one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from plan_graphs import random_costs, random_graph

from rannd.graph.fx.ir import Param, Size, TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.stage_costs.intervals import Intervals
from rannd.profile.costs import BlockCost


def kept_once(graph: TaskGraph, blocks: list[Block], costs: list[BlockCost], start: int, end: int, rows: int) -> float:
    """Bytes of activations of a run: what its blocks keep, without what it receives, sends, is given or gives out."""
    home = {op: number for number, block in enumerate(blocks) for op in block.ops}
    total = sum(cost.activation_bytes.at(rows) for cost in costs[start:end])
    for index, value in enumerate(graph.values):
        size = value.bytes.at(rows)
        times = sum(index in cost.kept for cost in costs[start:end])
        here = value.producer >= 0 and start <= home[value.producer] < end
        behind = any(index in op.inputs and home[number] >= end for number, op in enumerate(graph.ops))
        behind |= any(index in cost.kept for cost in costs[end:])
        counts = 1 if here and not behind and not value.is_output else 0
        total -= size * max(times - counts, 0)
    return total


@pytest.mark.parametrize("seed", range(100))
def test_what_several_blocks_keep_counts_once(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 10))
    ends = sorted({0, len(graph.ops), *(random.randint(0, len(graph.ops)) for _ in range(5))})
    blocks = [Block(tuple(range(start, end))) for start, end in pairwise(ends)]
    costs = []
    for block, cost in zip(blocks, random_costs(random, len(blocks)).blocks, strict=True):
        values = {value for op in block.ops for value in (*graph.ops[op].inputs, *graph.ops[op].outputs)}
        kept = tuple(sorted(value for value in values if random.random() < 0.6))
        own = sum((graph.values[value].bytes for value in kept), Size(10, 100))
        costs.append(msgspec.structs.replace(cost, kept=kept, activation_bytes=own))
    intervals = Intervals(graph, blocks, costs)
    for start in range(len(blocks)):
        for end in range(start + 1, len(blocks) + 1):
            for rows in (1, 7):
                found = sum(intervals.activation[power, start, end] * rows**power for power in range(3))
                assert found == pytest.approx(kept_once(graph, blocks, costs, start, end, rows))
                assert found >= 10 + 100 * rows - 1e-6


def trained_graph(random: Random, sizes: list[int], tied: list[int]) -> TaskGraph:
    """Operators with a parameter of `4 * size` bytes each; those of `tied` also read one of 120 bytes."""
    count = len(sizes)
    graph = msgspec.structs.replace(random_graph(random, count), unused_params=())
    params = [Param(f"p{at}", 4 * size, True) for at, size in enumerate([*sizes, 30])]
    params.append(Param("frozen", 400, False))
    ops = [
        msgspec.structs.replace(op, params=(at, *([count] if at in tied else []), count + 1))
        for at, op in enumerate(graph.ops)
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops), params=tuple(params))


def intervals_of(random: Random, sizes: list[int], tied: list[int]) -> Intervals:
    count = len(sizes)
    blocks = [Block((at,)) for at in range(count)]
    return Intervals(trained_graph(random, sizes, tied), blocks, random_costs(random, count).blocks)


@pytest.mark.parametrize("seed", range(60))
def test_what_replicas_have_as_a_whole_at_a_time(seed: int) -> None:
    random = Random(seed)
    count, tied = 8, sorted(random.sample(range(8), 2 + seed % 2))
    sizes = [random.randint(1, 50) for _ in range(count)]
    intervals = intervals_of(random, sizes, tied)
    units = intervals.units
    for start in range(count):
        for end in range(start + 1, count + 1):
            inside = start <= tied[0] and tied[-1] < end
            own = [4 * size for size in sizes[start:end]]
            whole = [size + 120 * (inside and start + at in tied) for at, size in enumerate(own)]
            both = [sum(pair) for pair in pairwise(own)] or own
            wholes = [sum(pair) for pair in pairwise(whole)] or whole
            expected = (max(whole), max(wholes), max(own), max(both), 120 * inside)
            assert tuple(float(table[start, end]) for table in units) == expected
            assert tuple(float(size[0]) for size in intervals.units_of(start, range(1, end - start + 1))) == expected


@pytest.mark.parametrize("seed", range(60))
def test_what_replicas_have_as_a_whole_at_a_time_in_segments_of_several_blocks(seed: int) -> None:
    random = Random(seed)
    tied = sorted(random.sample(range(8), 2 + seed % 2))
    sizes = [random.randint(1, 50) for _ in range(8)]
    start, end = random.choice([(0, 8), (1, 8), (0, 6), (2, 7)])
    ends = [*sorted(random.sample(range(1, end - start), random.randint(0, 3))), end - start]
    parts = [range(start + low, start + high) for low, high in pairwise([0, *ends])]
    inside = start <= tied[0] and tied[-1] < end
    together = inside and any(set(tied) <= set(part) for part in parts)
    own = [sum(4 * sizes[at] for at in part) for part in parts]
    grads = [size + 120 * (together and tied[0] in part) for size, part in zip(own, parts, strict=True)]
    whole = [size + 120 * (inside and any(at in part for at in tied)) for size, part in zip(own, parts, strict=True)]
    both, wholes = ([sum(pair) for pair in pairwise(each)] or each for each in (grads, whole))
    found = intervals_of(random, sizes, tied).units_of(start, ends)
    expected = (max(whole), max(wholes), max(grads), max(both), 120 * (inside and not together))
    assert tuple(float(size[0]) for size in found) == expected


@pytest.mark.parametrize("seed", range(60))
def test_neighbours_are_joined_up_to_a_size(seed: int) -> None:
    random = Random(seed)
    tied = sorted(random.sample(range(8), 2))
    sizes = [random.randint(1, 50) for _ in range(8)]
    weights = [4 * size + 120 * (at == tied[-1]) for at, size in enumerate(sizes)]
    intervals = intervals_of(random, sizes, tied)
    assert intervals.joined(1, 8, 0) == tuple(range(1, 8))
    assert intervals.joined(1, 8, 4000) == (7,)
    most = random.randint(100, 400)
    ends = [1 + end for end in intervals.joined(1, 8, most)]
    assert ends[-1] == 8
    for low, high in pairwise([1, *ends]):
        size = sum(weights[low:high])
        assert size <= most or high - low == 1
        if high < 8:
            assert size + weights[high] > most  # one more would be too much


@pytest.mark.parametrize("seed", range(30))
def test_what_blocks_start_from_is_large_or_small(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random, 8)
    blocks, rows, least = [Block((at,)) for at in range(len(graph.ops))], 3, 100.0
    intervals = Intervals(graph, blocks, random_costs(random, len(blocks)).blocks)
    small, read, two = intervals.handed_apart(rows, least)
    for start in range(len(blocks)):
        for end in range(start + 1, len(blocks) + 1):
            here = range(start, end)
            readers = {
                index: [at for at in here if at > value.producer and index in graph.ops[at].inputs]
                for index, value in enumerate(graph.values)
                if value.producer in here
            }
            size = {index: graph.values[index].bytes.at(rows) for index in readers}
            assert small[start, end] == sum(size[index] for index in readers if readers[index] and size[index] < least)
            large = {index: at for index, at in readers.items() if size[index] >= least}
            assert read[start, end] == sum(size[index] * len(at) for index, at in large.items())
            by_reader = [sum(size[index] for index, at in large.items() if block in at) for block in here]
            assert two[start, end] >= max(map(sum, pairwise(by_reader)), default=by_reader[0])
