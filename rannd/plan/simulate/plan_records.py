"""What a deployment has for display, beside what the runtime needs: the costs of its step, and its operators.

`with_records` puts them in where graph and costs are known. `drawn_step` simulates a step from them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import BlockTimes, Deployment, EdgeCost, OpTable, PlannedStep
from rannd.plan.plan_options import PlanOptions
from rannd.plan.schedule.program import Edge, Layout
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.simulate.layout import layout_and_costs, loss_layout, piece_rows
from rannd.plan.simulate.repeats import repeats
from rannd.plan.simulate.simulator import Simulation, timeline_of
from rannd.plan.simulate.step_costs import StepCosts
from rannd.profile.costs import CostTable

T = TypeVar("T")

LONGEST_TEXT = 160
"""Characters of a path of modules, or of a source line, in a table of operators."""


def with_records(
    graph: TaskGraph, blocks: Sequence[Block], costs: CostTable, deployment: Deployment, options: PlanOptions
) -> Deployment:
    """Return a deployment of `graph` with `planned` and `table`.

    Args:
        graph: The task graph.
        blocks: The blocks whose costs are given.
        costs: Their costs, and those of the links.
        deployment: A deployment of the graph.
        options: When and in which type gradients are reduced.
    """
    layout, step = layout_and_costs(
        graph,
        deployment,
        costs.link,
        costs.between,
        overlap=not options.sync_allreduce,
        options=options,
        runtime=costs.runtime,
    )
    layout = loss_layout(layout)
    return msgspec.structs.replace(
        deployment, planned=_planned(layout, step), table=_table(graph, blocks, costs, deployment)
    )


def _planned(layout: Layout, step: StepCosts) -> PlannedStep:
    far_values, far_grads = step.far_values_us or step.values_us, step.far_grads_us or step.grads_us
    edges = []
    for edge in layout.edges:
        src, dst = edge
        found = EdgeCost(src, dst, step.values_bytes[edge], step.values_us[edge], far_values[edge], False)
        if edge in layout.grad_edges:
            found = msgspec.structs.replace(
                found,
                has_grads=True,
                grads_bytes=step.grads_bytes[edge],
                near_grads_us=step.grads_us[edge],
                far_grads_us=far_grads[edge],
            )
        edges.append(found)
    return PlannedStep(
        forward_us=step.forward_us,
        backward_us=step.backward_us,
        weight_us=step.weight_us,
        edges=tuple(edges),
        reduce_us=step.reduce_us,
        after_us=step.after_us,
        tied=layout.tied,
        tied_us=step.tied_us,
        host_us=step.host_us,
        byte_us=step.byte_us,
        agreeing_us=step.agreeing_us,
    )


def _table(graph: TaskGraph, blocks: Sequence[Block], costs: CostTable, deployment: Deployment) -> OpTable:
    rows = piece_rows(deployment.batch_rows, len(deployment.slots), deployment.microbatches)
    block_of = {op: number for number, block in enumerate(blocks) for op in block.ops}
    number_of = {op.name: number for number, op in enumerate(graph.ops)}
    order = [number_of[name] for stage in deployment.stages for name in stage.ops]
    ops = [graph.ops[number] for number in order]
    texts: dict[str, int] = {}

    def numbers(each: Sequence[str]) -> tuple[int, ...]:
        return tuple(texts.setdefault(text[-LONGEST_TEXT:], len(texts)) for text in each)

    return OpTable(
        targets=numbers([op.target for op in ops]),
        modules=numbers([op.module for op in ops]),
        sources=numbers([op.source for op in ops]),
        dtypes=numbers([op.dtype for op in ops]),
        blocks=tuple(block_of[number] for number in order),
        flops=tuple(_whole(op.flops.at(rows)) for op in ops),
        param_bytes=tuple(sum(graph.params[read].bytes for read in op.params) for op in ops),
        output_bytes=tuple(_whole(sum(graph.values[made].bytes.at(rows) for made in op.outputs)) for op in ops),
        block_times=tuple(BlockTimes(each.forward_us.at(rows), each.backward_us.at(rows)) for each in costs.blocks),
        texts=tuple(texts),
    )


def _whole(number: float) -> int:
    return max(math.ceil(number), 0) if math.isfinite(number) else 0


class DrawnStep(msgspec.Struct, frozen=True):
    """A simulated step."""

    simulation: Simulation
    slots: tuple[int, ...]
    """Slots of the deployment that it is of, in the order of those of its events; all, or those of one pipeline."""


def drawn_step(
    deployment: Deployment, most: int, times: Callable[[int], tuple[float, float, float]] | None = None
) -> DrawnStep | None:
    """Simulate a step of a deployment; None if what it takes is not known, or if it has too many actions.

    Args:
        deployment: From anywhere, as `decode` returns it.
        most: Maximum number of computations. Of larger jobs the first of several equal pipelines may be drawn.
        times: Other times of a stage (by its number) than those that are planned: forward, backward and its part that
            may be delayed, each of one microbatch.

    Raises:
        PlanError: The schedule is not known, or it cannot run these stages.
    """
    planned = deployment.planned
    if planned is None:
        return None
    edges = tuple((edge.src, edge.dst) for edge in planned.edges)
    grads = tuple((edge.src, edge.dst) for edge in planned.edges if edge.has_grads)
    places = tuple(stage.slots for stage in deployment.stages)
    layout = Layout(len(deployment.slots), deployment.microbatches, places, edges, grads, planned.tied)
    nodes = tuple(slot.node for slot in deployment.slots)
    slots = tuple(range(layout.world))
    costs = _costs(planned, nodes, [times(number) for number in range(len(places))] if times else None)
    if _computations(layout) > most:
        if layout.pipelines == 1 or _computations(layout) > most * layout.pipelines:
            return None
        first = repeats(layout, nodes)[0]
        layout, slots = first.block, first.places[0]
        costs = msgspec.structs.replace(costs, nodes=first.nodes, tied_us=())
    program = planned_program(deployment.schedule, layout, costs.split)
    found = timeline_of(program, costs)
    return DrawnStep(found, slots)


def _computations(layout: Layout) -> int:
    return 2 * layout.pieces_total * len(layout.stages)


def _costs(
    planned: PlannedStep, nodes: tuple[int, ...], other: Sequence[tuple[float, float, float]] | None
) -> StepCosts:
    forward, backward, weight = planned.forward_us, planned.backward_us, planned.weight_us
    if other is not None:
        forward, backward, weight = (tuple(times[part] for times in other) for part in range(3))
    nothing = (0,) * len(forward)

    def by_edge(get: Callable[[EdgeCost], T], grads: bool = False) -> dict[Edge, T]:
        return {(each.src, each.dst): get(each) for each in planned.edges if each.has_grads or not grads}

    return StepCosts(
        forward_us=forward,
        backward_us=backward,
        weight_us=weight,
        values_us=by_edge(lambda each: each.near_us),
        grads_us=by_edge(lambda each: each.near_grads_us, True),
        far_values_us=by_edge(lambda each: each.far_us),
        far_grads_us=by_edge(lambda each: each.far_grads_us, True),
        reduce_us=planned.reduce_us,
        after_us=planned.after_us,
        tied_us=planned.tied_us,
        host_us=planned.host_us,
        byte_us=planned.byte_us,
        agreeing_us=planned.agreeing_us,
        nodes=nodes,
        state_bytes=nothing,
        kept_bytes=nothing,
        weight_bytes=nothing,
        working_bytes=nothing,
        values_bytes=by_edge(lambda each: each.values_bytes),
        grads_bytes=by_edge(lambda each: each.grads_bytes, True),
    )
