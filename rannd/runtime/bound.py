"""A graph bound to the slots of a deployment: what this rank computes of it, and which values travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from rannd.errors import DeploymentError
from rannd.graph.cut import Part, cut, stages_by_owner
from rannd.graph.model import ModelGraph
from rannd.plan.deployment import Deployment
from rannd.plan.schedule import Edge, Layout, Program, fill_drain


@dataclass(frozen=True)
class BoundGraph:
    """One graph, cut for a deployment, as the rank in `slot` runs it."""

    graph: ModelGraph
    layout: Layout
    program: Program
    slot: int
    stage: int
    part: Part
    recompute: bool
    edges: Mapping[Edge, tuple[Node, ...]]
    """Values that travel from stage to stage; stage -1 gives the inputs, the last number takes the outputs."""
    constants: Mapping[str, torch.Tensor]
    borrowed: Mapping[str, tuple[int, tuple[int, ...]]]
    """Tensors that stages read but do not hold: (slot that lends, slots that borrow), lent before each step."""
    stage_of: Mapping[Node, int]
    """Stage of every placed node."""
    _live: dict[tuple[bool, ...], frozenset[Node]] = field(default_factory=dict)

    def live(self, wanted: tuple[bool, ...]) -> frozenset[Node]:
        """Nodes that get a gradient when the outputs marked in `wanted` do."""
        if wanted not in self._live:
            found: set[Node] = set()
            stack = [node for node, marked in zip(self.graph.traced.results, wanted, strict=True) if marked]
            while stack:
                node = stack.pop()
                if node in found or node not in self.graph.placement.requires_grad:
                    continue
                found.add(node)
                stack += (*node.all_input_nodes, *self.graph.placement.writers.get(node, ()))
            self._live[wanted] = frozenset(found)
        return self._live[wanted]


def planned_stages(graph: ModelGraph, deployment: Deployment) -> dict[Node, int]:
    """Stage of every placed node of the graph that the deployment was planned for."""
    stage_of: dict[Node, int] = {}
    for number, stage in enumerate(deployment.stages):
        for name in stage.ops:
            if name not in graph.nodes or graph.nodes[name] in stage_of:
                raise DeploymentError(f"the deployment places op {name}, which this model's graph does not have (once)")
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
    """The stages that hold each parameter and buffer; unused ones stay with the first stage."""
    owners: dict[str, set[int]] = {name: {0} for name in deployment.unused_params}
    for node in graph.placement.placed:
        for attribute in graph.placement.attributes[node]:
            if graph.traced.is_state(attribute):
                owners.setdefault(graph.traced.attributes[attribute], set()).add(stage_of[node])
    return {name: tuple(sorted(stages)) for name, stages in owners.items()}


def bind(
    graph: ModelGraph,
    deployment: Deployment,
    slot: int,
    device: torch.device,
    owners: Mapping[str, tuple[int, ...]] | None,
) -> BoundGraph:
    """Cut `graph` for `deployment`: as planned, or by the `owners` of its parameters for any other graph."""
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
        if result.kind != "number":
            edges.setdefault((stage_of[node], count), []).append(node)
    travelling = {edge: tuple(nodes) for edge, nodes in sorted(edges.items())}
    differentiable = graph.placement.requires_grad
    layout = Layout(
        world=len(deployment.slots),
        microbatches=1 if graph.coupled else deployment.microbatches,
        stages=tuple(stage.slots for stage in deployment.stages),
        edges=tuple(travelling),
        grad_edges=tuple(edge for edge, nodes in travelling.items() if any(node in differentiable for node in nodes)),
    )
    stage = layout.stage_of(slot)
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
    constants = {
        name: graph.traced.constants[name].to(device) for name in parts[stage].tensors if name in graph.traced.constants
    }
    return BoundGraph(
        graph,
        layout,
        fill_drain(layout),
        slot,
        stage,
        parts[stage],
        deployment.stages[stage].recompute,
        travelling,
        constants,
        borrowed,
        stage_of,
    )
