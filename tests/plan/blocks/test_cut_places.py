"""CutPoints in the planner: stages begin at them and nowhere else, and the plan is the best of those."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import msgspec
import pytest
from brute_force import Plan, Reference
from plan_graphs import GraphBuilder, chain, random_costs, random_graph
from thinned import first

from rannd.errors import PlanError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.cut_places import cut_places
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.profile.costs import CostTable


def marked(graph: TaskGraph, segments: list[int]) -> TaskGraph:
    """The graph with a segment for each op."""
    ops = [msgspec.structs.replace(op, segment=each) for op, each in zip(graph.ops, segments, strict=True)]
    return msgspec.structs.replace(graph, ops=tuple(ops))


def planned(
    graph: TaskGraph, blocks: tuple[Block, ...], costs: CostTable, world: int, options: PlanOptions, rows: int = 16
) -> Deployment:
    slots = tuple(Slot(0, device) for device in range(world))
    return plan(graph, blocks, costs, world=world, slots=slots, batch_rows=rows, memory_bytes=10**15, options=options)


def starts(graph: TaskGraph, deployment: Deployment) -> list[int]:
    """First op of every stage but the first."""
    place = {op.name: index for index, op in enumerate(graph.ops)}
    return [min(place[name] for name in stage.ops) for stage in deployment.stages[1:]]


class Marked(Reference):
    """Enumerates only plans whose stages are apart in their segments."""

    def plans(self) -> Iterator[Plan]:
        for each in super().plans():
            segments = [
                [self.graph.ops[op].segment for block in self.blocks[start:end] for op in block.ops]
                for start, end in pairwise(each.bounds)
            ]
            if all(max(one) < min(other) for at, one in enumerate(segments) for other in segments[at + 1 :]):
                yield each


@pytest.mark.parametrize("hundred", first(1, range(3)))
def test_the_plan_has_the_least_e_of_all_that_cut_there(hundred: int) -> None:
    stages = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        random = Random(seed)
        world = random.randint(1, 5)
        options = PlanOptions(max_pipeline=random.choice([1, 4]))
        graph = random_graph(random, random.randint(2, 7))
        marks = sorted(random.choices(range(1, 5), k=len(graph.ops)))
        graph = marked(graph, marks)
        blocks = make_blocks(Partitioning.of(graph), options, world=world)
        costs = random_costs(random, len(blocks))
        rows = random.randint(1, 40)
        found = planned(graph, blocks, costs, world, options, rows)
        slots = tuple(Slot(0, device) for device in range(world))
        wanted = Marked(graph, blocks, costs, slots, rows, options).best(math.inf)
        assert wanted is not None
        assert math.isclose(found.step_us, wanted, rel_tol=1e-9, abs_tol=1e-6), seed
        stages += len(found.stages) > 1
    assert stages >= 10, "instances of one stage show nothing"


def test_stages_begin_at_cut_points_however_uneven() -> None:
    graph = marked(chain(12), [1, 1, 2, *[3] * 9])
    for stages in (2, 3):
        options = PlanOptions(partition_num=stages)
        blocks = make_blocks(Partitioning.of(graph), options, world=3)
        costs = random_costs(Random(1), len(blocks))
        assert set(starts(graph, planned(graph, blocks, costs, 3, options))) <= {2, 3}
    free = planned(graph, blocks, costs, 3, PlanOptions())
    assert set(starts(graph, free)) <= {2, 3}


def test_too_many_stages_are_refused() -> None:
    graph = marked(chain(12), [1] * 6 + [2] * 6)
    options = PlanOptions(partition_num=3)
    blocks = make_blocks(Partitioning.of(graph), options, world=3)
    whole = marked(chain(4), [1] * 4)  # a CutPoint before or behind everything
    with pytest.raises(PlanError, match="divide it into 1 part; use at most 1 stage"):
        planned(whole, make_blocks(Partitioning.of(whole), options, world=3), random_costs(Random(1), 4), 3, options)
    with pytest.raises(PlanError, match=r"partition_num=3.*CutPoints only, which divide it into 2 parts"):
        planned(graph, blocks, random_costs(Random(1), len(blocks)), 3, options)


@pytest.mark.parametrize("uncoarsen", [False, True])
@pytest.mark.parametrize("most", [2, 4, 32])
def test_blocks_do_not_cross_cut_points(most: int, uncoarsen: bool) -> None:
    segments = [1 + index // 3 for index in range(60)]
    graph = marked(chain(60), segments)
    options = PlanOptions(max_partition_num=most, min_partition_num=2, do_uncoarsening=uncoarsen)
    blocks = make_blocks(Partitioning.of(graph), options, world=2)
    assert 1 < len(blocks) <= most
    if most == 32:  # more than the 20 segments
        assert all(len({segments[op] for op in block.ops}) == 1 for block in blocks)
    else:  # whole segments
        assert all(block.ops[0] % 3 == 0 for block in blocks)


def test_without_cut_points_every_place_will_do() -> None:
    graph = chain(5)
    assert cut_places(graph, make_atoms(graph)) == [True] * 6
    assert Partitioning.of(graph).lost_cut_points == 0


def test_what_belongs_together_is_not_cut() -> None:
    builder = GraphBuilder()
    value = builder.input()
    for index in range(6):
        value = builder.op([value], group=7 if index in (1, 3) else None, output=index == 5)
    graph = marked(builder.build(), [1, 1, 2, 2, 3, 3])
    atoms = make_atoms(graph)
    assert atoms == ((0,), (1, 2, 3), (4,), (5,))
    assert cut_places(graph, atoms) == [True, False, True, False, True]
    assert Partitioning.of(graph).lost_cut_points == 1


def test_ops_that_wait_for_nothing_stay_in_their_segment() -> None:
    builder = GraphBuilder()
    first, second = builder.input(), builder.input()
    value = builder.op([first])
    value = builder.op([value])
    other = builder.op([second])  # in the second segment, although it could run at once
    builder.op([value, other], output=True)
    graph = marked(builder.build(), [1, 1, 2, 2])
    assert make_atoms(graph) == ((0,), (1,), (2,), (3,))
    assert cut_places(graph, make_atoms(graph)) == [True, False, True, False, True]
