"""What bounds.py promises: no plan is better than a bound, whatever it is asked to be sharp for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product

import msgspec
import numpy as np
import pytest
from plan_graphs import GraphBuilder
from plan_instances import PLENTY, Instance, seeds
from thinned import first

from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.bounds import FINE, Bounds, exclude, sharpen
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import piece_rows
from rannd.plan.simulate.step_costs import BUCKET
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.stage_costs.least_terms import LeastTerms
from rannd.plan.stage_costs.shared_tables import SharedTables
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Machine
from rannd.profile.costs import BlockCost, CostTable, LinkCost


def tables(
    graph: TaskGraph,
    blocks: tuple[Block, ...],
    costs: CostTable,
    slots: Sequence[Slot],
    rows: int,
    options: PlanOptions,
    variant: Variant,
    limit: float,
    replicas: Sequence[int] = (),
) -> StageTables:
    """All stages of one variant; `replicas`: those that are allowed, where not all are."""
    intervals = Intervals(graph, blocks, costs.blocks)
    machine = Machine(slots, costs.link, costs.between, costs.runtime)
    count, world = len(blocks), len(slots)
    return StageTables(
        SharedTables(intervals, machine),
        options,
        variant,
        rows=piece_rows(rows, world, variant.microbatches),
        limit=limit,
        allowed=np.ones((count + 1, count + 1), dtype=bool),
        replicas=np.array(replicas or range(1, world + 1)),
    )


def forward_heavy(costs: CostTable) -> CostTable:
    """Recomputing is what takes time, and hides reductions."""
    blocks = [BlockCost(cost.backward_us, cost.forward_us, cost.activation_bytes) for cost in costs.blocks]
    return msgspec.structs.replace(costs, blocks=tuple(blocks))


@pytest.mark.parametrize("checkpointing", first(1, [True, False]))
@pytest.mark.parametrize("share", first(1, [1.2, None, 1.02]))
def test_no_plan_of_several_stages_is_better_than_its_bound(share: float | None, checkpointing: bool) -> None:
    looked = Counter[str]()
    for seed in seeds(120):
        instance = Instance(seed, checkpointing=checkpointing)
        if seed % 2:
            instance.costs = instance.reference.costs = forward_heavy(instance.costs)
        reference = instance.reference
        limit = PLENTY if share is None else math.ceil(reference.smallest_memory() * share)
        best: dict[Variant, float] = {}
        for each in reference.plans():
            needs = [
                [reference.memory(each, number, recompute=again) <= limit for again in (False, True)]
                for number in range(len(each.replicas))
            ]
            again = [checkpointing or not plain for plain, _ in needs]
            if len(each.replicas) > 1 and all(need[which] for need, which in zip(needs, again, strict=True)):
                variant = Variant(each.schedule, each.microbatches, each.placement)
                best[variant] = min(best.get(variant, math.inf), reference.step_us(each, again))
        for (variant, least), wide in product(best.items(), (1.0001, 1.5)):
            table = tables(
                instance.graph, instance.blocks, instance.costs, instance.slots, instance.batch_rows,
                instance.options, variant, float(limit),
            )  # fmt: skip
            bounds = Bounds(LeastTerms([table]), 0)
            assert bounds.root[0] <= least * (1 + 1e-9), (seed, variant)
            exclude([(bounds, np.array([least * wide]))])
            assert bounds.root[0] <= least * (1 + 1e-9), (seed, variant, bounds.root[0] / least)
            sharpen([(bounds, np.array([least * wide]))], FINE)
            assert bounds.root[0] <= least * (1 + 1e-9) + 1e-6, (seed, variant, bounds.root[0] / least)
            looked[variant.schedule] += 1
    assert min(looked["1f1b"], looked["gpipe"]) > len(seeds(120)) / 3, looked


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("share", first(1, [1.02, None, 1.2]))
def test_nor_than_the_bound_of_equal_replicas(share: float | None, checkpointing: bool) -> None:
    sharper = exact = 0
    for seed in seeds(60):
        instance = Instance(seed, world=6, checkpointing=checkpointing)
        limit = PLENTY if share is None else math.ceil(instance.reference.smallest_memory() * share)
        best: dict[tuple[Variant, int], float] = {}
        for each in instance.reference.plans():
            if len(each.replicas) > 1 and len(set(each.replicas)) == 1 and each.schedule == "1f1b":
                key = Variant(each.schedule, each.microbatches, each.placement), each.replicas[0]
                again = [
                    checkpointing or instance.reference.memory(each, number, recompute=False) > limit
                    for number in range(len(each.replicas))
                ]
                fits = all(
                    instance.reference.memory(each, number, recompute=which) <= limit
                    for number, which in enumerate(again)
                )
                least = instance.reference.step_us(each, again) if fits else math.inf
                best[key] = min(best.get(key, math.inf), least)
        for (variant, replicas), least in best.items():
            table = tables(
                instance.graph, instance.blocks, instance.costs, instance.slots, instance.batch_rows,
                instance.options, variant, float(limit), [replicas],
            )  # fmt: skip
            bounds = Bounds(LeastTerms([table]), 0)
            before = bounds.root[0]
            assert bounds.fit()
            assert not bounds.fit()
            assert bounds.root[0] <= least * (1 + 1e-9), (seed, variant, replicas)
            sharper += before < bounds.root[0]
            exact += bounds.root[0] >= least * (1 - 1e-9)
            check_fitting(table, instance.world // replicas)
    assert sharper > 0.8 * len(seeds(60))
    assert exact > len(seeds(60)) / 12


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stages", first(1, [2, 0]))
def test_bounds_of_several_variants_are_those_of_each_alone(stages: int, checkpointing: bool) -> None:
    raised = Counter[str]()
    for seed in range(60):
        instance = Instance(seed, checkpointing=checkpointing)
        limit = math.ceil(instance.reference.smallest_memory() * 1.1)
        schedule, zero = ("1f1b", "gpipe", "zb_h1")[seed % 3], seed // 3 % 4 if seed % 3 < 2 else 0
        replicas = [1] if zero >= 2 or seed % 2 else []
        each = [
            tables(
                instance.graph, instance.blocks, instance.costs, instance.slots, instance.batch_rows,
                instance.options, Variant(schedule, count, "stages", zero), float(limit), replicas,
            )
            for count in (1, 2, 4)
        ]  # fmt: skip
        together = Bounds(LeastTerms(each), stages)
        alone = [Bounds(LeastTerms([table]), stages) for table in each]
        below = np.array([root * (1.02 + 0.1 * (seed % 4)) for root in together.root])
        below[seed % 3] = (0.0, math.inf)[seed % 2]  # nothing is asked, or whether anything fits
        for name, change in (("exclude", exclude), ("fit", None), ("sharpen", partial(sharpen, number=FINE))):
            before = together.root
            if change is None:
                assert {bounds.fit() for bounds in alone} == {together.fit()}
            else:
                change([(together, below)])
                change([(bounds, below[[place]]) for place, bounds in enumerate(alone)])
            assert [bounds.root[0] for bounds in alone] == together.root, (seed, name)
            assert LeastTerms(each).alone() == [LeastTerms([table]).alone()[0] for table in each]
            raised[name] += before != together.root
    assert min(raised[name] for name in ("exclude", "fit", "sharpen")) > 2, raised


def check_fitting(table: StageTables, stages: int) -> None:
    """Which stages fit, and which of them without recomputing, is what the search finds for each of them."""
    count = table.blocks + 1
    runs = np.triu_indices(count, 1)
    plain, again = np.zeros((2, stages, count, count), dtype=bool)
    plain[:, *runs], again[:, *runs] = (each[0] for each in LeastTerms([table]).fitting(stages))
    for before in range(stages):
        used = (stages - 1 - before) * int(table.replicas[0])
        for end in range(before + 1, table.blocks + 1):
            terms = table.stages(end, used)
            possible = np.isfinite(terms.fill[:, 0])
            assert (plain | again)[before, :end, end][possible].all()
            assert (plain[before, :end, end] == ~terms.recompute[:, 0])[possible].all()


def test_bounds_of_equal_replicas_need_equal_replicas_and_turns() -> None:
    instance = next(found for seed in range(99) if (found := Instance(seed, world=4, ops=8)).world == 4)
    for schedule, replicas, helps in (("1f1b", [1], True), ("1f1b", [1, 2], False), ("gpipe", [1], False)):
        table = tables(
            instance.graph, instance.blocks, instance.costs, instance.slots, instance.batch_rows, instance.options,
            Variant(schedule, 1, "stages"), PLENTY, replicas,
        )  # fmt: skip
        assert Bounds(LeastTerms([table]), 0).fit() == (helps and table.blocks >= 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_reduction_has_the_recomputed_forward_to_hide_behind(schedule: str) -> None:
    """All parameters are in the last of two stages, whose replicas reduce for longer than their backward takes."""
    builder = GraphBuilder()
    first = builder.op([builder.input(0)], size=0)
    builder.op([first], params=[builder.param(4 * BUCKET)], size=0, output=True)
    block = BlockCost(Size(0, 100), Size(0, 10), Size(0, 1000))
    link = LinkCost(0, 1e6, 0, 4 * BUCKET / 1000)
    options = PlanOptions(checkpointing=True, replica_num=2, pipeline_num=1, min_partition_num=1)
    graph, world = builder.build(), 4
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    found = plan(
        graph, blocks, CostTable((block, block), link), world=world,
        slots=tuple(Slot(0, device) for device in range(world)), batch_rows=world, memory_bytes=PLENTY,
        options=options, interleaved=schedule == "1f1b",
    )  # fmt: skip
    assert found.schedule == schedule
    # 100 forward twice, 110 backward twice, another round, 1000 to reduce: each stage's last backward hides 110
    assert found.step_us == 2 * 100 + 2 * 110 + 210 + (1000 - 2 * 110)
    slots = [Slot(0, device) for device in range(world)]
    costs = CostTable((block, block), link)
    table = tables(graph, blocks, costs, slots, world, options, Variant(schedule, 1, "stages"), PLENTY, [2])
    bounds = Bounds(LeastTerms([table]), 0)
    sharpen([(bounds, np.array([found.step_us * 1.5]))], FINE)
    assert bounds.root[0] <= found.step_us
