"""Where a deployment puts the nodes and tensors of the graph that it was planned for: stages and segments."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from rannd.errors import CutError, DeploymentError
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import check_order
from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment


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


def planned_segments(graph: ModelGraph, deployment: Deployment) -> dict[Node, int]:
    """Map every placed node to its segment; segments are numbered through all stages, see `first_segments`."""
    return {
        graph.nodes[name]: first + number
        for stage, first in zip(deployment.stages, first_segments(deployment), strict=True)
        for name, number in zip(stage.ops, stage.segment_of or [0] * len(stage.ops), strict=True)
    }


def first_segments(deployment: Deployment) -> list[int]:
    """Number of the first segment of each stage, where segments are numbered through all stages."""
    found, count = [], 0
    for stage in deployment.stages:
        found.append(count)
        count += len(stage.segments)
    return found


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
    """Segments that read each parameter and buffer of the planned graph, numbered through all stages."""
    found: dict[str, set[int]] = {}
    segment_of = planned_segments(graph, deployment)
    for node in graph.placement.placed:
        for attribute in graph.placement.attributes[node]:
            if graph.traced.is_state(attribute):
                found.setdefault(graph.traced.attributes[attribute], set()).add(segment_of[node])
    return {name: tuple(sorted(segments)) for name, segments in found.items()}


def follows_plan(graph: ModelGraph, deployment: Deployment, owners: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a graph can be cut as the planned one, because it has the same operators but for their sizes.

    `owners`: stages that hold each parameter and buffer.
    """
    if graph.nodes.keys() != {name for stage in deployment.stages for name in stage.ops}:
        return False
    try:
        check_planned_cut(graph, deployment)
    except CutError:
        return False
    read = tensor_owners(graph, planned_stages(graph, deployment), deployment)
    return all(set(stages) <= set(owners.get(name, ())) for name, stages in read.items())


def check_planned_cut(graph: ModelGraph, deployment: Deployment) -> None:
    """Check that the graph can be cut as a deployment says. CutError if not: no planner has made it then."""
    stage_of = planned_stages(graph, deployment)
    check_order(graph.placement, stage_of.keys(), stage_of, "stage")
    segment_of = planned_segments(graph, deployment)
    for number in range(len(deployment.stages)):
        members = frozenset(node for node, stage in stage_of.items() if stage == number)
        check_order(graph.placement, members, segment_of, "segment")
