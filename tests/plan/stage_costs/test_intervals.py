"""Sums over runs of blocks against what a run's blocks say one by one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from plan_graphs import random_costs, random_graph

from rannd.graph.fx.ir import Size, TaskGraph
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
