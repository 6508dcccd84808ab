"""Bind a graph to a deployment: this rank's stage, and the values sent between stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from rannd.errors import DeploymentError
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import (
    Part,
    check_order,
    crossing_shape,
    cut,
    extract,
    segments_by_owner,
    stages_by_owner,
)
from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment
from rannd.plan.schedule.program import ActionKind, Edge, Layout, Program
from rannd.plan.schedule.schedules import gpipe, interleaved_program
from rannd.plan.simulate.layout import layout_of

LARGE_OUTPUT = 1 << 16
"""Bytes per row above which an output besides the loss is not sent to the ranks in training, unless requested."""


@dataclass(frozen=True)
class Traffic:
    """A Program and the values that its transfers send."""

    program: Program
    edges: Mapping[Edge, tuple[Node, ...]]
    """Values sent from stage to stage; stage -1 stands for the inputs, stage `len(stages)` for the outputs."""
    overlaps: bool = True
    """Whether reductions of gradients begin in the last backward of a slot."""

    @property
    def layout(self) -> Layout:
        return self.program.layout


@dataclass(frozen=True)
class LossTraffic:
    """Traffic of a step whose backward starts at its single loss, inside the forward call."""

    traffic: Traffic
    loss: Node
    live: frozenset[Node]
    """Nodes that get a gradient."""
    missing: frozenset[Node]
    """Outputs that are not sent to the ranks."""


@dataclass(frozen=True)
class Segment:
    """Operators of a stage that run one after the other, forward and backward: a part of the stage with its own end.

    Between segments gradients are handed over as they are between stages.
    """

    part: Part
    members: frozenset[Node]
    """Its placed nodes."""
    recompute: bool


@dataclass(frozen=True)
class BoundGraph:
    """A graph partitioned for a deployment, with the stage that the rank in `slot` runs."""

    graph: ModelGraph
    traffic: Traffic
    """For calls whose backward runs when the script calls it, if at all."""
    interleaved: LossTraffic | None
    """For calls whose backward may run inside the forward call; None if the graph has no single loss."""
    slot: int
    stage: int
    part: Part
    segments: tuple[Segment, ...]
    """What `part` is made of, in the order in which it runs."""
    constants: Mapping[str, torch.Tensor]
    borrowed: Mapping[str, tuple[int, tuple[int, ...]]]
    """Tensors that stages read but do not hold: (lending slot, borrowing slots), sent before each step."""
    stage_of: Mapping[Node, int]
    """Stage of every placed node."""
    meets: bool = False
    """Whether the replicas of a stage meet in each microbatch (ZeRO 2 and 3)."""
    _live: dict[tuple[bool, ...], frozenset[Node]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Layout with all edges, including outputs that an interleaved step does not send."""
        return self.traffic.layout

    @property
    def splits(self) -> bool:
        """Whether backwards of this stage come in two halves, in calls whose backward runs inside."""
        program = self.interleaved.traffic.program.slots[self.slot] if self.interleaved is not None else ()
        return any(action.kind is ActionKind.WEIGHT for action in program)

    def runs_backward_inside(self, *, wanted: bool, scaled: bool) -> bool:
        """Whether backward runs inside the call.

        Args:
            wanted: The configuration item `interleave_loss`.
            scaled: Whether losses are scaled: in float16 small gradients would underflow without it.
        """
        mode = self.graph.signature.mode
        return wanted and self.interleaved is not None and mode.grad and (scaled or not mode.float16)

    def live(self, wanted: tuple[bool, ...]) -> frozenset[Node]:
        """Nodes that get a gradient if the outputs marked in `wanted` have one."""
        if wanted not in self._live:
            self._live[wanted] = _live(self.graph, wanted)
        return self._live[wanted]


def _live(graph: ModelGraph, wanted: tuple[bool, ...]) -> frozenset[Node]:
    found: set[Node] = set()
    stack = [node for node, marked in zip(graph.traced.results, wanted, strict=True) if marked]
    while stack:
        node = stack.pop()
        if node in found or node not in graph.placement.requires_grad:
            continue
        found.add(node)
        stack += (*node.all_input_nodes, *graph.placement.writers.get(node, ()))
    return frozenset(found)


def planned_stages(graph: ModelGraph, deployment: Deployment) -> dict[Node, int]:
    """Map every placed node to its stage, for the graph that the deployment was planned for."""
    stage_of: dict[Node, int] = {}
    for number, stage in enumerate(deployment.stages):
        for name in stage.ops:
            if name not in graph.nodes or graph.nodes[name] in stage_of:
                raise DeploymentError(
                    f"the deployment places op {plain(name)}, which this model's graph does not have (once)"
                )
            stage_of[graph.nodes[name]] = number
    missing = [name for name, node in graph.nodes.items() if node not in stage_of]
    if missing:
        raise DeploymentError(
            f"the deployment does not place {len(missing)} ops of the model, the first is {missing[0]}"
        )
    return stage_of


def tensor_owners(
    graph: ModelGraph, stage_of: Mapping[Node, int], deployment: Deployment
) -> dict[str, tuple[int, ...]]:
    """Stages that hold each parameter and buffer; unused ones are on the first stage."""
    owners: dict[str, set[int]] = {name: {0} for name in deployment.unused_params}
    for node in graph.placement.placed:
        for attribute in graph.placement.attributes[node]:
            if graph.traced.is_state(attribute):
                owners.setdefault(graph.traced.attributes[attribute], set()).add(stage_of[node])
    return {name: tuple(sorted(stages)) for name, stages in owners.items()}


def segment_owners(graph: ModelGraph, deployment: Deployment) -> dict[str, tuple[int, ...]]:
    """Segments that read each parameter and buffer of the planned graph, numbered within their stages.

    Of a tensor that several stages read, those of all of them.
    """
    found: dict[str, set[int]] = {}
    segment_of = _planned_segments(graph, deployment)
    for node in graph.placement.placed:
        for attribute in graph.placement.attributes[node]:
            if graph.traced.is_state(attribute):
                found.setdefault(graph.traced.attributes[attribute], set()).add(segment_of[node])
    return {name: tuple(sorted(segments)) for name, segments in found.items()}


def _planned_segments(graph: ModelGraph, deployment: Deployment) -> dict[Node, int]:
    return {
        graph.nodes[name]: number
        for stage in deployment.stages
        for name, number in zip(stage.ops, stage.segment_of or [0] * len(stage.ops), strict=True)
    }


def _segments(
    graph: ModelGraph,
    deployment: Deployment,
    stage: int,
    part: Part,
    stage_of: Mapping[Node, int],
    owners: Mapping[str, tuple[int, ...]] | None,
) -> tuple[Segment, ...]:
    """Divide a stage into its segments: as planned, or by the `owners` of its tensors for any other graph."""
    planned = deployment.stages[stage]
    settings = planned.segments
    members = frozenset(node for node, number in stage_of.items() if number == stage)
    if len(settings) == 1:
        return (Segment(part, members, settings[0]),)
    if owners is None:
        segment_of = _planned_segments(graph, deployment)
    else:
        segment_of = segments_by_owner(graph.traced, graph.placement, members, owners)
    check_order(graph.placement, members, segment_of, "segment")
    found = []
    for number, recompute in enumerate(settings):
        mine = frozenset(node for node in members if segment_of[node] == number)
        if mine:
            name = f"{planned.name}_{number}"
            found.append(Segment(extract(graph.traced, graph.placement, mine, name), mine, recompute))
    return tuple(found)


def check_planned_cut(graph: ModelGraph, deployment: Deployment) -> None:
    """Check that the graph can be cut as a deployment says. CutError if not: no planner has made it then."""
    stage_of = planned_stages(graph, deployment)
    check_order(graph.placement, stage_of.keys(), stage_of, "stage")
    segment_of = _planned_segments(graph, deployment)
    for number in range(len(deployment.stages)):
        members = frozenset(node for node, stage in stage_of.items() if stage == number)
        check_order(graph.placement, members, segment_of, "segment")


def bind(
    graph: ModelGraph,
    deployment: Deployment,
    slot: int,
    owners: Mapping[str, tuple[int, ...]] | None,
    segment_owners: Mapping[str, tuple[int, ...]] | None = None,
    *,
    all_outputs: bool = False,
) -> BoundGraph:
    """Partition `graph` for `deployment`: as planned, or by the `owners` of its parameters for any other graph.

    `segment_owners`: for any other graph, the segments of stages that hold its parameters.

    `all_outputs`: in training, outputs besides the loss are sent to the ranks regardless of their size.
    """
    count = len(deployment.stages)
    if owners is None:
        stage_of = planned_stages(graph, deployment)
    else:
        stage_of = stages_by_owner(graph.traced, graph.placement, owners, count)
    parts = cut(graph.traced, graph.placement, stage_of, [stage.name for stage in deployment.stages])
    edges: dict[Edge, list[Node]] = {}
    for number, part in enumerate(parts):
        for node in part.inputs:
            source = -1 if node.op == "placeholder" else stage_of[node]
            edges.setdefault((source, number), []).append(node)
    for node, result in zip(graph.traced.results, graph.results, strict=True):
        if result.is_sent:  # losses are summed on the ranks that compute them
            edges.setdefault((stage_of[node], count), []).append(node)
    layout = _layout(graph, deployment, edges, graph.placement.requires_grad)
    if owners is None:
        _check_planned(layout, layout_of(graph.task, deployment))
    traffic = Traffic(gpipe(layout), _sorted(edges))
    borrowers: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for name in part.tensors:
            if owners is not None and name in owners and number not in owners[name]:
                borrowers.setdefault(name, set()).update(layout.stages[number])
    borrowed = {
        name: (layout.stages[owners[name][0]][0], tuple(sorted(slots)))
        for name, slots in sorted(borrowers.items())
        if owners is not None
    }
    stage = layout.stage_of(slot)
    constants = {name: graph.traced.constants[name] for name in parts[stage].tensors if name in graph.traced.constants}
    return BoundGraph(
        graph,
        traffic,
        _loss_traffic(graph, deployment, layout, edges, all_outputs=all_outputs),
        slot,
        stage,
        parts[stage],
        _segments(graph, deployment, stage, parts[stage], stage_of, segment_owners),
        constants,
        borrowed,
        stage_of,
        deployment.zero >= 2,
    )


def _check_planned(bound: Layout, planned: Layout) -> None:
    """Check that a planned graph's cut parts exchange what the planner has simulated.

    Raises:
        DeploymentError: They do not.
    """
    for name in ("world", "stages", "edges", "grad_edges"):
        here, there = getattr(bound, name), getattr(planned, name)
        if here != there:
            raise DeploymentError(f"the stages have {name} {here}, the plan has {there}; please report this")


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


def _loss_traffic(
    graph: ModelGraph, deployment: Deployment, layout: Layout, edges: Mapping[Edge, list[Node]], *, all_outputs: bool
) -> LossTraffic | None:
    """Traffic of an interleaved step; None if the graph does not have exactly one loss, or is not trained."""
    last, loss = len(layout.stages), graph.sole_loss
    if loss is None:
        return None
    results = list(zip(graph.traced.results, graph.results, strict=True))
    live = _live(graph, tuple(node is loss for node, _ in results))
    kinds = {node: result.kind for node, result in results}
    missing: set[Node] = set()
    kept: dict[Edge, list[Node]] = {}
    for edge, nodes in edges.items():
        if edge[1] == last and not all_outputs and _moves(layout, edge):
            large = [node for node in nodes if _row_bytes(node, kinds[node]) > LARGE_OUTPUT]
            missing.update(large)
            nodes = [node for node in nodes if node not in large]
        if nodes:
            kept[edge] = nodes
    # No gradients are sent for outputs: backward starts at the loss alone.
    inner = {edge: nodes if edge[1] < last else [] for edge, nodes in kept.items()}
    new = _layout(graph, deployment, kept, live)
    flowing = tuple(edge for edge in new.grad_edges if inner[edge])
    new = Layout(new.world, new.microbatches, new.stages, new.edges, flowing)
    split = {number for number, planned in enumerate(deployment.stages) if planned.estimate.weight_us > 0}
    traffic = Traffic(interleaved_program(deployment.schedule, new, split), _sorted(kept))
    return LossTraffic(traffic, loss, live, frozenset(missing))


def _moves(layout: Layout, edge: Edge) -> bool:
    """Whether some microbatch changes slots on an edge."""
    return any(layout.slot_of(edge[0], piece) != layout.slot_of(edge[1], piece) for piece in range(layout.pieces_total))


def _row_bytes(node: Node, kind: str) -> int:
    """Bytes per row of an output, or total bytes if it has no batch dimension."""
    value = node.meta["val"]

    def size(rows: int) -> int:
        return math.prod(crossing_shape(node, rows)) * int(value.dtype.itemsize)

    return size(2) - size(1) if kind == "rows" else size(1)
