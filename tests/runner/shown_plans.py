"""Plans to show: small ones, one of 10,000 operators, and one whose names are attacks."""

from __future__ import annotations

import msgspec
from plan_graphs import costs_for, transformer

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Provenance, Slot
from rannd.plan.measured_step import MEASURED_FORMAT, MeasuredStep, RankTimes, StageTimes, StepEvent, Typical
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.plan.simulate.plan_records import drawn_step, with_records
from rannd.profile.costs import RuntimeCost

ATTACK = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&amp;"
"""A name of a module that would be code if it became a part of the page."""


def planned(
    graph: TaskGraph | None = None, world: int = 4, *, ranked: bool = True, memory: int = 2_000_000, **items: object
) -> Deployment:
    """A plan as a job stores it, with equal costs of all blocks; each operator has a line of its layer's file."""
    graph = transformer(6) if graph is None else graph
    ops = tuple(msgspec.structs.replace(op, source=f"models/net.py:{10 + at % 15}") for at, op in enumerate(graph.ops))
    graph = msgspec.structs.replace(graph, ops=ops)
    options = PlanOptions(**items)  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    costs = msgspec.structs.replace(costs_for(len(blocks), activation=1000.0), runtime=RuntimeCost(5.0, 30.0, 2.0))
    slots = tuple(Slot(*divmod(device, max(world // 2, 1))) for device in range(world))
    deployment = plan(
        graph,
        blocks,
        costs,
        world=world,
        slots=slots,
        batch_rows=16 * world,
        memory_bytes=memory,
        options=options,
        ranked=ranked,
    )
    made = Provenance("Box", "measured", "0.1.0", "2.13.0")
    deployment = msgspec.structs.replace(deployment, made=made, model="Net 1.5M")
    return with_records(graph, blocks, costs, deployment, options)


def large(world: int = 16) -> Deployment:
    """A plan of 10,000 operators."""
    return planned(
        transformer(588), world, ranked=False, memory=10**15, partition_num=8, pipeline_num=8, max_partition_num=64
    )


def attacking(deployment: Deployment) -> Deployment:
    """The same plan of a model whose names are attacks, from a file that says so."""
    table = deployment.table
    assert table is not None
    stages = tuple(
        msgspec.structs.replace(stage, modules=ATTACK, name=ATTACK, ops=(f"{ATTACK}{number}", *stage.ops[1:]))
        for number, stage in enumerate(deployment.stages)
    )
    texts = tuple(f"{ATTACK}{number}" for number in range(len(table.texts)))
    reasons = tuple(msgspec.structs.replace(each, why=ATTACK, chosen=ATTACK) for each in deployment.reasons)
    return msgspec.structs.replace(
        deployment,
        stages=stages,
        model=ATTACK,
        reasons=reasons,
        table=msgspec.structs.replace(table, texts=texts),
        made=Provenance(ATTACK, ATTACK, ATTACK, ATTACK),
    )


def measured(deployment: Deployment, slower: float = 1.2, *, events: bool = False) -> MeasuredStep:
    """What was measured if computations took `slower` times as long as planned; `events`: with those of a step."""
    ranks = []
    for slot in range(len(deployment.slots)):
        stages = []
        for number, stage in enumerate(deployment.stages):
            if slot in stage.slots:
                each = stage.estimate
                halves = (each.backward_us - each.weight_us, each.weight_us)
                times = [Typical(slower * us / each.pieces, us / each.pieces) for us in (each.forward_us, *halves)]
                stages.append(StageTimes(number, each.pieces, *times))
        ranks.append(RankTimes(slot, 20, tuple(stages), (), slower * deployment.step_us, 1.0, 0, 0, 0, 0, 7.0))
    found: tuple[StepEvent, ...] = ()
    step = drawn_step(deployment, 10**6) if events else None
    if step is not None:
        found = tuple(
            StepEvent(each.slot, each.category, slower * each.start_us, slower * each.us, each.name)
            for each in step.simulation.events
        )
    return MeasuredStep(MEASURED_FORMAT, tuple(ranks), events=found)
