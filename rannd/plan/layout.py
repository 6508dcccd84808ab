"""From a deployment to what a schedule and the simulator need: who sends what to whom, and how long it takes."""

from __future__ import annotations

import math
from collections import defaultdict

from rannd.errors import DeploymentError
from rannd.graph.ir import Size, TaskGraph
from rannd.plan.deployment import Deployment
from rannd.plan.schedule import Edge, Layout
from rannd.plan.simulate import StepCosts
from rannd.profile.costs import LinkCost


def piece_rows(batch_rows: int, world: int, microbatches: int) -> int:
    """Rows of the largest piece of a global batch of `batch_rows` rows."""
    return math.ceil(math.ceil(batch_rows / world) / microbatches)


def layout_of(graph: TaskGraph, deployment: Deployment) -> Layout:
    """The layout in which `deployment` runs `graph`.

    An input that the model hands back as it is stays with its rank and is no edge. DeploymentError where the
    deployment places other ops than the graph's.
    """
    sizes, grads = _edge_sizes(graph, deployment)
    return Layout(
        world=len(deployment.slots),
        microbatches=deployment.microbatches,
        stages=tuple(stage.slots for stage in deployment.stages),
        edges=tuple(sorted(sizes)),
        grad_edges=tuple(sorted(grads)),
    )


def step_costs(graph: TaskGraph, deployment: Deployment, link: LinkCost) -> StepCosts:
    """Costs of the actions of a Program of `deployment`, by its estimates and `link`."""
    layout = layout_of(graph, deployment)
    rows = piece_rows(deployment.batch_rows, layout.world, layout.microbatches)
    sizes, grads = _edge_sizes(graph, deployment)
    pieces = [math.ceil(layout.pieces_total / len(slots)) for slots in layout.stages]
    estimates = [stage.estimate for stage in deployment.stages]
    again = [stage.recompute for stage in deployment.stages]
    activation = [
        each.activation_bytes if recompute else math.ceil(each.activation_bytes / count)
        for each, recompute, count in zip(estimates, again, pieces, strict=True)
    ]
    return StepCosts(
        forward_us=tuple(each.forward_us / count for each, count in zip(estimates, pieces, strict=True)),
        backward_us=tuple(each.backward_us / count for each, count in zip(estimates, pieces, strict=True)),
        reduce_us=tuple(each.allreduce_us for each in estimates),
        values_us={edge: link.p2p_us(size.at(rows)) for edge, size in sizes.items()},
        grads_us={edge: link.p2p_us(size.at(rows)) for edge, size in grads.items()},
        kept_bytes=tuple(0 if recompute else size for recompute, size in zip(again, activation, strict=True)),
        working_bytes=tuple(size if recompute else 0 for recompute, size in zip(again, activation, strict=True)),
    )


def _edge_sizes(graph: TaskGraph, deployment: Deployment) -> tuple[dict[Edge, Size], dict[Edge, Size]]:
    """Bytes of the values, and of the gradients, that go over each edge."""
    stage_of_name = {name: number for number, stage in enumerate(deployment.stages) for name in stage.ops}
    if sum(len(stage.ops) for stage in deployment.stages) != len(stage_of_name) or set(stage_of_name) != {
        op.name for op in graph.ops
    }:
        raise DeploymentError(
            f"the deployment places {len(stage_of_name)} ops, of which not all are the model's {len(graph.ops)}; "
            "it belongs to another model: plan again without it"
        )
    stage_of = [stage_of_name[op.name] for op in graph.ops]
    last = len(deployment.stages)
    targets: dict[int, set[int]] = defaultdict(set)
    for index, op in enumerate(graph.ops):
        for read in op.inputs:
            targets[read].add(stage_of[index])
    sizes: dict[Edge, Size] = defaultdict(Size)
    grads: dict[Edge, Size] = defaultdict(Size)
    for index, value in enumerate(graph.values):
        home = stage_of[value.producer] if value.producer >= 0 else -1
        if value.is_output and home >= 0:
            targets[index].add(last)
        for target in targets[index] - {home}:
            sizes[home, target] += value.bytes
            if value.requires_grad:
                grads[home, target] += value.bytes
    return dict(sizes), dict(grads)
