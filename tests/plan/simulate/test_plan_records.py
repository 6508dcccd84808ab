"""A step that is simulated from what a deployment stores is the one that was planned."""

from __future__ import annotations

import msgspec
import pytest
from plan_graphs import chain, costs_for, transformer
from plan_instances import Instance, played

from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.plan.simulate.plan_records import LONGEST_TEXT, drawn_step, with_records


def recorded(world: int, *, ops: int = 12, **items: object) -> Deployment:
    graph, options = chain(ops), PlanOptions(**items)  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    costs = costs_for(len(blocks))
    slots = tuple(Slot(0, device) for device in range(world))
    found = plan(
        graph,
        blocks,
        costs,
        world=world,
        slots=slots,
        batch_rows=16 * world,
        memory_bytes=10**15,
        options=options,
        ranked=True,
    )
    return with_records(graph, blocks, costs, found, options)


@pytest.mark.parametrize("seed", range(60))
def test_the_drawn_step_takes_as_long_as_the_planned_one(seed: int) -> None:
    instance = Instance(seed)
    deployment = instance.plan()
    stored = with_records(instance.graph, instance.blocks, instance.costs, deployment, instance.options)
    assert msgspec.structs.replace(stored, planned=None, table=None) == deployment
    step = drawn_step(decode(encode(stored)), 10**6)
    assert step is not None
    assert step.slots == tuple(range(len(deployment.slots)))
    expected = played(instance, deployment)
    assert step.simulation.step_us == pytest.approx(expected.step_us)
    assert step.simulation.busy_us == pytest.approx(expected.busy_us)
    assert step.simulation.events


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved_1f1b"])
def test_every_schedule_is_drawn(schedule: str) -> None:
    deployment = recorded(
        2, partition_num=4 if schedule == "interleaved_1f1b" else 2, pipeline_num=4, schedule=schedule
    )
    assert deployment.schedule == schedule
    step = drawn_step(deployment, 10**6)
    assert step is not None
    assert step.simulation.step_us == pytest.approx(deployment.step_us)


def test_of_a_large_job_one_of_its_equal_pipelines_is_drawn() -> None:
    deployment = recorded(8, partition_num=2, pipeline_num=4)
    whole = drawn_step(deployment, 10**6)
    assert whole is not None
    computations = 2 * 8 * 4 * 2
    part = drawn_step(deployment, computations // 2)
    assert part is not None
    assert len(part.slots) == 2
    assert [sum(slot in stage.slots for slot in part.slots) for stage in deployment.stages] == [1, 1]
    for place, slot in enumerate(part.slots):
        assert part.simulation.busy_us[place] == pytest.approx(whole.simulation.busy_us[slot])
    assert drawn_step(deployment, 3) is None


def test_other_times_of_stages_make_another_step() -> None:
    deployment = recorded(2, partition_num=2, pipeline_num=4)
    planned = deployment.planned
    assert planned is not None
    usual = drawn_step(deployment, 10**6)
    twice = drawn_step(
        deployment, 10**6, lambda stage: (2 * planned.forward_us[stage], 2 * planned.backward_us[stage], 0.0)
    )
    assert usual is not None
    assert twice is not None
    assert twice.simulation.busy_us == pytest.approx([2 * us for us in usual.simulation.busy_us])


def test_a_deployment_without_records_is_not_drawn() -> None:
    assert drawn_step(msgspec.structs.replace(recorded(2), planned=None), 10**6) is None


def test_the_table_has_the_operators_of_the_stages_in_order() -> None:
    graph, options = transformer(3), PlanOptions(partition_num=2)
    long = "m" * 300
    ops = [msgspec.structs.replace(op, source=f"net.py:{at}") for at, op in enumerate(graph.ops)]
    ops[0] = msgspec.structs.replace(ops[0], module=long)
    graph = msgspec.structs.replace(graph, ops=tuple(ops))
    blocks = make_blocks(Partitioning.of(graph), options, world=2)
    costs = costs_for(len(blocks))
    found = plan(
        graph,
        blocks,
        costs,
        world=2,
        slots=(Slot(0, 0), Slot(0, 1)),
        batch_rows=16,
        memory_bytes=10**15,
        options=options,
    )
    stored = with_records(graph, blocks, costs, found, options)
    table = stored.table
    assert table is not None
    names = [name for stage in stored.stages for name in stage.ops]
    for place, name in enumerate(names):
        op = next(each for each in graph.ops if each.name == name)
        assert table.texts[table.targets[place]] == op.target
        assert table.texts[table.modules[place]] == op.module[-LONGEST_TEXT:]
        assert table.texts[table.sources[place]] == op.source
        assert table.param_bytes[place] == sum(graph.params[read].bytes for read in op.params)
        assert graph.ops.index(op) in blocks[table.blocks[place]].ops
        rows = 16 // 2 // stored.microbatches
        assert table.flops[place] == op.flops.at(rows)
        assert table.output_bytes[place] == -(-graph.values[op.outputs[0]].bytes.at(rows) // 1)
    assert len(table.block_times) == len(blocks)
    assert table.block_times[0].forward_us == costs.blocks[0].forward_us.at(rows)
