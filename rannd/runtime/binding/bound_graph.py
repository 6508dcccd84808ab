"""Bind a graph to a deployment: this rank's stages, and the values sent between stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from rannd.errors import DeploymentError
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, check_order, cut, extract_segments, segments_by_owner, stages_by_owner
from rannd.plan.deployment import Deployment
from rannd.plan.schedule.program import ActionKind, Edge, Layout
from rannd.plan.simulate.layout import layout_of
from rannd.runtime.binding.planned_cut import first_segments, follows_plan, planned_segments, planned_stages
from rannd.runtime.binding.traffic import LossTraffic, Traffic, asked_traffic, live_nodes, loss_traffic


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
class BoundStage:
    """A stage that this rank runs."""

    number: int
    part: Part
    segments: tuple[Segment, ...]
    """What `part` is made of, in the order in which it runs."""
    constants: Mapping[str, torch.Tensor]
    splits: bool
    """Whether its backwards come in two halves, in calls whose backward runs inside."""
    stays_whole: bool
    """Whether parameters that replicas divide (ZeRO 3) stay whole until the last microbatch."""
    forward_us: float = 0.0
    backward_us: float = 0.0
    """Times of a microbatch in the plan; 0: the graph is another one."""
    planned_rows: float = 0.0
    """Rows of such a microbatch."""


@dataclass(frozen=True)
class BoundGraph:
    """A graph partitioned for a deployment, with the stages that the rank in `slot` runs."""

    graph: ModelGraph
    traffic: Traffic
    """For calls whose backward runs when the script calls it, if at all."""
    interleaved: LossTraffic | None
    """For calls whose backward may run inside the forward call; None if the graph has no single loss."""
    slot: int
    stages: tuple[BoundStage, ...]
    """Ascending; several if the schedule has several stages per slot."""
    borrowed: Mapping[str, tuple[int, tuple[int, ...]]]
    """Tensors that slots read but do not hold: (lending slot, borrowing slots), sent before each step."""
    stage_of: Mapping[Node, int]
    """Stage of every placed node."""
    anywhere: Callable[[int], BoundStage]
    """Makes any stage, also those of other ranks, by its number."""
    meets: bool = False
    """Whether the replicas of a stage meet in each microbatch (ZeRO 2 and 3)."""
    _live: dict[tuple[bool, ...], frozenset[Node]] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Layout with all edges, including outputs that an interleaved step does not send."""
        return self.traffic.layout

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all stages of this rank."""
        return tuple(segment for stage in self.stages for segment in stage.segments)

    def runs_backward_inside(self, *, wanted: bool, scaled: bool) -> bool:
        """Whether backward runs inside the call.

        Args:
            wanted: The configuration item `interleave_loss`.
            scaled: Whether losses are scaled: in float16 small gradients would underflow without it.
        """
        mode = self.graph.signature.mode
        return wanted and self.interleaved is not None and mode.grad and (scaled or not mode.float16)

    def traffic_of(self, *, inside: bool) -> Traffic:
        """Traffic of a call; `inside`: its backward runs inside."""
        if not inside:
            return self.traffic
        assert self.interleaved is not None
        return self.interleaved.traffic

    def live(self, wanted: tuple[bool, ...]) -> frozenset[Node]:
        """Nodes that get a gradient if the outputs marked in `wanted` have one."""
        if wanted not in self._live:
            self._live[wanted] = live_nodes(self.graph, wanted)
        return self._live[wanted]


def bind(
    graph: ModelGraph,
    deployment: Deployment,
    slot: int,
    owners: Mapping[str, tuple[int, ...]] | None,
    segment_owners: Mapping[str, tuple[int, ...]] | None = None,
    *,
    all_outputs: bool = False,
    missing: Collection[int] | None = None,
    compiled: bool = False,
) -> BoundGraph:
    """Partition `graph` for `deployment`: as planned, or by the `owners` of its parameters for any other graph.

    A graph of other operators is cut by the owners, one of the planned graph's operators in other sizes as planned.

    Args:
        graph: The graph.
        deployment: The plan.
        slot: This rank's slot.
        owners: None for the planned graph; for others the stages that hold each parameter and buffer.
        segment_owners: For others, the segments that hold them, numbered through all stages.
        all_outputs: In training, outputs besides the loss are sent to the ranks regardless of their size.
        missing: Places of those that are not sent, as known from a graph of other sizes; None: large ones are not.
        compiled: The units of which segments are compiled have copies of all that is recomputed.
    """
    planned = owners is None
    if owners is not None and follows_plan(graph, deployment, owners):
        owners = segment_owners = None
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
    traffic = asked_traffic(graph, deployment, edges)
    layout = traffic.layout
    if planned:
        _check_planned(layout, layout_of(graph.task, deployment))
    interleaved = loss_traffic(graph, deployment, layout, edges, all_outputs=all_outputs, missing=missing)
    actions = interleaved.traffic.program.slots[slot] if interleaved is not None else ()
    split = {layout.stage_at(slot, action) for action in actions if action.kind is ActionKind.WEIGHT}

    def stage(number: int) -> BoundStage:
        return BoundStage(
            number,
            parts[number],
            _segments(graph, deployment, number, parts[number], stage_of, segment_owners, compiled=compiled),
            {name: graph.traced.constants[name] for name in parts[number].tensors if name in graph.traced.constants},
            number in split,
            deployment.stages[number].stays_whole,
            *(_planned_piece(deployment, number) if planned else ()),
        )

    stages = tuple(map(stage, layout.stages_of(slot)))
    borrowed = {} if owners is None else _borrowed(layout, parts, owners)
    return BoundGraph(graph, traffic, interleaved, slot, stages, borrowed, stage_of, stage, deployment.zero >= 2)


def _planned_piece(deployment: Deployment, stage: int) -> tuple[float, float, float]:
    """Microseconds of forward and backward of a microbatch in a stage, and its rows."""
    estimate = deployment.stages[stage].estimate
    pieces, all_pieces = max(estimate.pieces, 1), deployment.microbatches * len(deployment.slots)
    return estimate.forward_us / pieces, estimate.backward_us / pieces, deployment.batch_rows / all_pieces


def _borrowed(
    layout: Layout, parts: tuple[Part, ...], owners: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Tensors that slots read but do not hold: (lending slot, borrowing slots)."""
    readers: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for name in part.tensors:
            if name in owners:
                readers.setdefault(name, set()).update(layout.stages[number])
    found = {}
    for name, slots in sorted(readers.items()):
        borrowers = slots - {slot for stage in owners[name] for slot in layout.stages[stage]}
        if borrowers:
            found[name] = (layout.stages[owners[name][0]][0], tuple(sorted(borrowers)))
    return found


def _segments(
    graph: ModelGraph,
    deployment: Deployment,
    stage: int,
    part: Part,
    stage_of: Mapping[Node, int],
    owners: Mapping[str, tuple[int, ...]] | None,
    *,
    compiled: bool,
) -> tuple[Segment, ...]:
    """Divide a stage into its segments: as planned, or by the `owners` of its tensors for any other graph."""
    planned = deployment.stages[stage]
    settings = planned.segments
    members = frozenset(node for node, number in stage_of.items() if number == stage)
    if len(settings) == 1:
        return (Segment(part, members, settings[0]),)
    first = first_segments(deployment)[stage]
    if owners is None:
        segment_of = planned_segments(graph, deployment)
    else:
        last = first + len(settings)
        held = {name: tuple(each - first for each in at if first <= each < last) for name, at in owners.items()}
        by_owner = segments_by_owner(graph.traced, graph.placement, members, held)
        segment_of = {node: first + number for node, number in by_owner.items()}
    check_order(graph.placement, members, segment_of, "segment")
    found = []
    for number, recompute in enumerate(settings):
        mine = frozenset(node for node in members if segment_of[node] == first + number)
        if mine:
            found.append((f"{planned.name}_{number}", mine, recompute))
    made = extract_segments(
        graph.traced, graph.placement, [(name, mine, again or compiled) for name, mine, again in found]
    )
    return tuple(Segment(own, mine, again) for own, (_, mine, again) in zip(made, found, strict=True))


def _check_planned(bound: Layout, planned: Layout) -> None:
    """Check that a planned graph's cut parts exchange what the planner has simulated.

    Raises:
        DeploymentError: They do not.
    """
    for name in ("world", "stages", "edges", "grad_edges"):
        here, there = getattr(bound, name), getattr(planned, name)
        if here != there:
            raise DeploymentError(f"the stages have {name} {here}, the plan has {there}; please report this")
