"""Plans of small graphs, and random planning problems."""

from __future__ import annotations

import os
from random import Random

import msgspec
from brute_force import Reference
from plan_graphs import costs_for, random_costs, random_graph

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import RUN_MODES, RunMode
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.simulator import Simulation, predict
from rannd.profile.costs import CostTable, LinkCost, RuntimeCost

PLENTY = 10**15
WHAT = [
    "stages",
    "microbatches",
    "schedule",
    "ZeRO",
    "offload",
    "offload params",
    "offload activations",
    "recompute",
    "virtual stages",
]
"""What of a plan there are reasons for, in their order."""
OTHER = [way for way in RUN_MODES if way.zero or way.schedule not in ("1f1b", "gpipe")]
"""All run modes but the plain ones."""


def seeds(count: int) -> range:
    """Seeds of instances: all of them in `make test-full`, which looks for new examples, else two fifths."""
    return range(count if os.environ["TEST_SEED"] != "0" else 2 * count // 5)


def deploy(
    graph: TaskGraph,
    world: int,
    *,
    memory: int = 10**15,
    rows: int = 64,
    ranked: bool = False,
    activation: float = 1000.0,
    **items: object,
) -> Deployment:
    """Plan with equal costs of all blocks, which keep `activation` bytes for each row."""
    options = PlanOptions(**items)  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    return plan(
        graph,
        blocks,
        costs_for(len(blocks), activation=activation),
        world=world,
        slots=tuple(Slot(0, device) for device in range(world)),
        batch_rows=rows * world,
        memory_bytes=memory,
        options=options,
        ranked=ranked,
    )


def copying(link: LinkCost, random: Random) -> LinkCost:
    """A link whose messages and reductions take time of the ranks' processors."""
    return msgspec.structs.replace(
        link,
        p2p_host_us=random.choice([0.1, 0.5, 0.7]) / link.p2p_bytes_per_us,
        allreduce_host_us=random.choice([0.3, 1.0]) / link.allreduce_bytes_per_us,
    )


class Instance:
    """A random model on a random machine; all of it follows from `seed`."""

    def __init__(
        self, seed: int, *, world: int = 5, ops: int = 6, way: RunMode | None = None, **options: object
    ) -> None:
        random = self.random = Random(seed)
        self.world = random.randint(1, world)
        self.options = PlanOptions(max_pipeline=random.choice([1, 4, 8]), **options)  # type: ignore[arg-type]
        self.graph: TaskGraph = random_graph(random, random.randint(1, ops))
        self.batch_rows = random.randint(1, 40)
        self.blocks: tuple[Block, ...] = make_blocks(Partitioning.of(self.graph), self.options, world=self.world)
        self.costs: CostTable = random_costs(random, len(self.blocks))
        if seed % 2:
            action_us, call_us = Random(seed).choice([0.5, 20.0]), Random(seed).choice([0.0, 30.0])
            runtime = RuntimeCost(action_us, call_us, Random(seed + 1).choice([0.0, 5.0, 40.0]))
            self.costs = msgspec.structs.replace(self.costs, runtime=runtime)
        if seed % 3 == 1:
            links = [copying(link, Random(seed + 2)) for link in (self.costs.link, self.costs.between) if link]
            self.costs = CostTable(self.costs.blocks, *links, runtime=self.costs.runtime)
        self.interleaved = random.random() < 0.7
        run = way or RunMode("1f1b" if self.interleaved else "gpipe")
        self.way: RunMode | None = run
        per_node = random.choice([1, 2, 3, self.world])
        self.slots = tuple(Slot(*divmod(device, per_node)) for device in range(self.world))
        self.reference = Reference(
            self.graph,
            self.blocks,
            self.costs,
            self.slots,
            self.batch_rows,
            self.options,
            schedule=run.schedule,
            zero=run.zero,
        )

    def demand(self, **items: int) -> None:
        self.options = self.reference.options = PlanOptions(max_pipeline=self.options.max_pipeline, **items)

    def plan(self, memory: int = PLENTY, *, ranked: bool = False) -> Deployment:
        return plan(
            self.graph,
            self.blocks,
            self.costs,
            world=self.world,
            slots=self.slots,
            batch_rows=self.batch_rows,
            memory_bytes=memory,
            options=self.options,
            interleaved=self.interleaved,
            way=self.way,
            ranked=ranked,
        )


def played(instance: Instance, deployment: Deployment) -> Simulation:
    """One step of a deployment."""
    layout = loss_layout(layout_of(instance.graph, deployment))
    costs = instance.costs
    given = step_costs(instance.graph, deployment, costs.link, costs.between, runtime=costs.runtime)
    return predict(deployment.schedule, layout, given)
