"""What the stages of a bound graph send to each other, and the Programs that move it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.plan.deployment import Deployment
from rannd.plan.schedule.program import Edge, Layout, Program
from rannd.plan.schedule.schedules import gpipe, planned_program

LARGE_OUTPUT = 1 << 16
"""Bytes per row above which an output besides the loss is not sent to the ranks in training, unless requested.

Of graphs that differ in sizes alone, the first one decides.
"""


@dataclass(frozen=True)
class Traffic:
    """A Program and the values that its transfers send."""

    program: Program
    edges: Mapping[Edge, tuple[Node, ...]]
    """Values sent from stage to stage; stage -1 stands for the inputs, stage `len(stages)` for the outputs."""
    overlaps: bool = True
    """Whether reductions of gradients begin in the last backward of each stage."""

    @property
    def layout(self) -> Layout:
        return self.program.layout

    @cached_property
    def leaving(self) -> Mapping[int, tuple[tuple[Node, int], ...]]:
        """By stage, the values that it gives to others, each with a stage that reads it."""
        found: dict[int, list[tuple[Node, int]]] = {}
        for (source, reader), nodes in self.edges.items():
            found.setdefault(source, []).extend((node, reader) for node in nodes)
        return {stage: tuple(each) for stage, each in found.items()}


@dataclass(frozen=True)
class LossTraffic:
    """Traffic of a step whose backward starts at its single loss, inside the forward call."""

    traffic: Traffic
    loss: Node
    live: frozenset[Node]
    """Nodes that get a gradient."""
    missing: frozenset[Node]
    """Outputs that are not sent to the ranks."""


def live_nodes(graph: ModelGraph, wanted: tuple[bool, ...]) -> frozenset[Node]:
    """Nodes that get a gradient if the outputs marked in `wanted` have one."""
    found: set[Node] = set()
    stack = [node for node, marked in zip(graph.traced.results, wanted, strict=True) if marked]
    while stack:
        node = stack.pop()
        if node in found or node not in graph.placement.requires_grad:
            continue
        found.add(node)
        stack += (*node.all_input_nodes, *graph.placement.writers.get(node, ()))
    return frozenset(found)


def asked_traffic(graph: ModelGraph, deployment: Deployment, edges: Mapping[Edge, list[Node]]) -> Traffic:
    """Traffic of calls whose backward runs when the script asks for it, if at all."""
    return Traffic(gpipe(_layout(graph, deployment, edges, graph.placement.requires_grad)), _sorted(edges))


def loss_traffic(
    graph: ModelGraph,
    deployment: Deployment,
    layout: Layout,
    edges: Mapping[Edge, list[Node]],
    *,
    all_outputs: bool,
    missing: Collection[int] | None,
) -> LossTraffic | None:
    """Traffic of a step whose backward runs inside the call; None if the graph does not have exactly one loss, or is
    not trained. `all_outputs`, `missing`: see `bind`."""
    last, loss = len(layout.stages), graph.sole_loss
    if loss is None:
        return None
    results = list(zip(graph.traced.results, graph.results, strict=True))
    live = live_nodes(graph, tuple(node is loss for node, _ in results))
    kinds = {node: result.kind for node, result in results}
    back: set[Node] = set()
    elsewhere = None if missing is None else {graph.traced.results[place] for place in missing}
    kept: dict[Edge, list[Node]] = {}
    for edge, nodes in edges.items():
        if edge[1] == last and not all_outputs and _moves(layout, edge):
            if elsewhere is None:
                back.update(node for node in nodes if _row_bytes(node, kinds[node]) > LARGE_OUTPUT)
            else:
                back.update(elsewhere.intersection(nodes))
            nodes = [node for node in nodes if node not in back]
        if nodes:
            kept[edge] = nodes
    # No gradients are sent for outputs: backward starts at the loss alone.
    inner = {edge: nodes if edge[1] < last else [] for edge, nodes in kept.items()}
    new = _layout(graph, deployment, kept, live)
    flowing = tuple(edge for edge in new.grad_edges if inner[edge])
    new = Layout(new.world, new.microbatches, new.stages, new.edges, flowing)
    split = {number for number, planned in enumerate(deployment.stages) if planned.estimate.weight_us > 0}
    traffic = Traffic(planned_program(deployment.schedule, new, split), _sorted(kept))
    return LossTraffic(traffic, loss, live, frozenset(back))


def _sorted(edges: Mapping[Edge, list[Node]]) -> dict[Edge, tuple[Node, ...]]:
    return {edge: tuple(nodes) for edge, nodes in sorted(edges.items())}


def _layout(
    graph: ModelGraph, deployment: Deployment, edges: Mapping[Edge, list[Node]], differentiable: Set[Node]
) -> Layout:
    return Layout(
        world=len(deployment.slots),
        microbatches=1 if graph.coupled else deployment.microbatches,
        stages=tuple(stage.slots for stage in deployment.stages),
        edges=tuple(sorted(edges)),
        grad_edges=tuple(edge for edge in sorted(edges) if any(node in differentiable for node in edges[edge])),
    )


def _moves(layout: Layout, edge: Edge) -> bool:
    """Whether some microbatch changes slots on an edge."""
    return any(layout.slot_of(edge[0], piece) != layout.slot_of(edge[1], piece) for piece in range(layout.pieces_total))


def _row_bytes(node: Node, kind: str) -> int:
    """Bytes per row of an output, or total bytes if it has no batch dimension."""
    value = node.meta["val"]

    def size(rows: int) -> int:
        return math.prod(crossing_shape(node, rows)) * int(value.dtype.itemsize)

    return size(2) - size(1) if kind == "rows" else size(1)
