"""Extract subgraphs from a traced graph: pipeline stages, and blocks to be profiled.

A subgraph takes explicit arguments: values of other subgraphs, parameters and buffers, and numbers computed from the
number of rows. Recomputed nodes are copied into every subgraph that reads them, but for those that one segment of a
stage hands over to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from rannd.errors import CutError
from rannd.graph.fx.direct_calls import direct_module
from rannd.graph.fx.memory_layout import reshape
from rannd.graph.fx.sizes import is_known, is_number, is_plain_tensor, number_at, numel_at, shape_at
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import Traced
from rannd.graph.partition.placement import Placement


@dataclass(frozen=True)
class Part:
    """A subgraph as a module: ``module(*values, *tensors, *numbers)`` returns the tuple of `outputs`."""

    module: GraphModule
    inputs: tuple[Node, ...]
    """Nodes of the traced graph whose values come from other subgraphs or from the caller."""
    tensors: tuple[str, ...]
    """Names of the parameters, buffers and constants."""
    numbers: tuple[Node, ...]
    """Nodes of the traced graph that are numbers computed from the number of rows."""
    outputs: tuple[Node, ...]
    """Nodes of the traced graph that other subgraphs or the caller read."""
    random: bool
    """Whether the subgraph draws random numbers."""

    def numbers_at(self, rows: int) -> list[Any]:
        """Values of the number arguments for a microbatch of `rows` rows."""
        return [number_at(node.meta["val"], rows) for node in self.numbers]


def extract(
    traced: Traced,
    placement: Placement,
    members: Set[Node],
    name: str,
    *,
    given: Set[Node] = frozenset(),
    asked: Set[Node] = frozenset(),
) -> Part:
    """Extract the placed nodes `members`, with copies of the recomputed nodes that they read.

    `given`: recomputed nodes whose values are inputs instead; `asked`: those that are outputs, where there are copies.
    """
    results = set(traced.results)
    needed = _needed(placement, members, given)
    inputs: dict[Node, None] = {}
    tensors: dict[str, list[Node]] = {}
    numbers: dict[str, list[Node]] = {}
    for node in traced.graph.nodes:
        if node not in needed:
            continue
        for source in node.all_input_nodes:
            if is_number(source.meta.get("val")):
                found = numbers.setdefault(str(source.meta["val"]), [])
                if source not in found:
                    found.append(source)
            elif source in traced.attributes:
                found = tensors.setdefault(traced.attributes[source], [])
                if source not in found:
                    found.append(source)
            elif source not in needed and source.op != "get_attr":
                inputs[source] = None

    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = _placeholder(graph, f"value_{node.name}", node)
    for index, nodes in enumerate(tensors.values()):
        copies.update(dict.fromkeys(nodes, _placeholder(graph, f"tensor_{index}", nodes[0])))
    for index, nodes in enumerate(numbers.values()):
        copies.update(dict.fromkeys(nodes, _placeholder(graph, f"number_{index}", nodes[0])))

    def copy(source: Node) -> Node:
        if source not in copies:  # get_attr of a no_grad or autocast subgraph
            copies[source] = graph.node_copy(source)
        return copies[source]

    outputs = []
    for node in traced.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copy)
            if node not in placement.writers:
                reshape(copies[node])
            if is_number(node.meta.get("val")):
                continue  # every stage computes it from the number of rows
            if node in asked or (
                node in members and (node in results or any(user not in needed for user in node.users))
            ):
                outputs.append(node)
    graph.output(tuple(copies[node] for node in outputs))
    module = direct_module(traced.root, graph, name)
    random = any(node in placement.random for node in members)
    return Part(module, tuple(inputs), tuple(tensors), tuple(n[0] for n in numbers.values()), tuple(outputs), random)


def extract_segments(
    traced: Traced, placement: Placement, segments: Sequence[tuple[str, Set[Node], bool]]
) -> list[Part]:
    """Extract the segments of a stage, given by name, placed nodes, and whether each recomputes, in their order.

    What several segments compute from arguments alone (masks, positions) the first of them hands over to the others,
    unless it is larger than all else that enters them: it stays in memory from the first to the last. Segments that
    recompute compute it themselves, so that they keep nothing but what the plan counts.
    """
    needs = [set() if again else _needed(placement, members) - members for _, members, again in segments]
    shared = shared_early(placement, [members for _, members, again in segments if not again])
    parts: list[Part] = []
    asked: set[Node] = set()
    for number, (name, members, _) in reversed(list(enumerate(segments))):
        entering = {source for node in members for source in placement.reads[node]} - members
        largest = max(map(_size, entering), default=0)
        earlier = {node for need in needs[:number] for node in need}
        given = {node for node in shared & needs[number] & earlier if _size(node) <= largest}
        part = extract(traced, placement, members, name, given=given, asked=asked & (needs[number] - given))
        asked = asked.difference(part.outputs) | given.intersection(part.inputs)
        parts.append(part)
    return parts[::-1]


def shared_early(placement: Placement, sets: Iterable[Set[Node]]) -> set[Node]:
    """Return what several of these sets of placed nodes read of what is computed from arguments alone (masks)."""
    often = Counter(node for members in sets for node in _needed(placement, members) - members)
    return {node for node, count in often.items() if count > 1 and node in placement.early and is_plain_tensor(node)}


def _size(node: Node) -> int:
    """Bytes of a value for two rows."""
    value = node.meta.get("val")
    return numel_at(value, 2) * value.dtype.itemsize if isinstance(value, TensorValue) and is_known(value) else 0


def _needed(placement: Placement, members: Set[Node], given: Set[Node] = frozenset()) -> set[Node]:
    needed = set(members)
    stack = list(members)
    while stack:
        for source in stack.pop().all_input_nodes:
            if (
                source in placement.recomputed
                and source not in needed
                and source not in given
                and not is_number(source.meta.get("val"))
            ):
                needed.add(source)
                stack.append(source)
    return needed


def _placeholder(graph: Graph, name: str, source: Node) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = source.meta.get("val")
    node.meta["source"] = source
    return node


def cut(traced: Traced, placement: Placement, stage_of: Mapping[Node, int], names: Sequence[str]) -> tuple[Part, ...]:
    """Cut a traced graph into stages.

    `stage_of` maps every placed node to its stage. CutError if a stage would read from a later one, or if nodes of one
    group are on different stages.
    """
    check_order(placement, stage_of.keys(), stage_of, "stage")
    members: list[set[Node]] = [set() for _ in names]
    for node in placement.placed:
        members[stage_of[node]].add(node)
    return tuple(extract(traced, placement, nodes, name) for nodes, name in zip(members, names, strict=True))


def stages_by_owner(
    traced: Traced, placement: Placement, owners: Mapping[str, tuple[int, ...]], stages: int
) -> dict[Node, int]:
    """Assign nodes to stages by the parameters they read, for a graph whose parameters are already placed.

    `owners` maps each parameter and buffer to the stages that hold it. If the order of the graph does not allow an
    operator to run there, it runs in a later stage, which borrows the tensor; CutError if the operator would write
    into it or need its gradient.
    """
    gradients = placement.requires_grad
    stage_of_group: dict[int, int] = dict.fromkeys(placement.group.values(), 0)
    changed = True
    while changed:
        changed = False
        for node in placement.placed:
            group = placement.group[node]
            stage = stage_of_group[group]
            for source in placement.reads[node]:
                if source.op == "call_function":
                    stage = max(stage, stage_of_group[placement.group[source]])
            for attribute in placement.attributes[node]:
                name = traced.attributes[attribute]
                if name not in owners:
                    continue
                later = [owner for owner in owners[name] if owner >= stage]
                if not later and attribute not in gradients and name not in placement.written:
                    continue  # borrowed
                if not later:
                    raise CutError(
                        f"{node.name} needs {name}, which stages {list(owners[name])} of {stages} hold, but reads "
                        f"values of stage {stage}: this call of the model uses its layers in another order than the "
                        "call it was planned for. Call it under torch.no_grad() if it needs no gradients; otherwise "
                        "call the model first in the way that it is trained, or use one stage (partition_num=1)"
                    )
                stage = min(later)
            if stage != stage_of_group[group]:
                stage_of_group[group] = stage
                changed = True
    return {node: stage_of_group[placement.group[node]] for node in placement.placed}


def check_order(placement: Placement, members: Set[Node], number_of: Mapping[Node, int], what: str) -> None:
    """Check that `members` can run in the order of the numbers of their stages or segments (`what`).

    CutError if one would read from a later one, or if nodes of one group are in different ones.
    """
    together: dict[int, int] = {}
    for node in placement.placed:
        if node not in members:
            continue
        number = number_of[node]
        if together.setdefault(placement.group[node], number) != number:
            raise CutError(
                f"{node.name} is in {what} {number}, but shares memory or belongs together with ops in {what} "
                f"{together[placement.group[node]]}; the plan does not belong to this graph"
            )
        for source in placement.reads[node]:
            if source.op == "call_function" and source in members and number_of[source] > number:
                raise CutError(
                    f"{node.name} in {what} {number} reads {source.name} of {what} {number_of[source]}; "
                    "the plan does not belong to this graph"
                )


def segments_by_owner(
    traced: Traced, placement: Placement, members: Set[Node], owners: Mapping[str, tuple[int, ...]]
) -> dict[Node, int]:
    """Assign the nodes of a stage to its segments by the parameters they read, for a graph whose stages are known.

    `owners` maps parameters and buffers to segments. What cannot run there in the order of the graph runs later.
    """
    segment_of_group = {placement.group[node]: 0 for node in members}
    changed = True
    while changed:
        changed = False
        for node in placement.placed:
            if node not in members:
                continue
            group = placement.group[node]
            segment = segment_of_group[group]
            for source in placement.reads[node]:
                if source in members:
                    segment = max(segment, segment_of_group[placement.group[source]])
            for attribute in placement.attributes[node]:
                held = owners.get(traced.attributes[attribute], ())
                segment = min((each for each in held if each >= segment), default=segment)
            if segment != segment_of_group[group]:
                segment_of_group[group] = segment
                changed = True
    return {node: segment_of_group[placement.group[node]] for node in members}


def crossing_shape(node: Node, rows: int) -> tuple[int, ...]:
    """Shape of a value for a microbatch of `rows` rows."""
    return shape_at(node.meta["val"], rows)
