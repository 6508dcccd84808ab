"""Divides a stage into units, which are compiled one by one: the planner's blocks, or the whole stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torch.fx import Node

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.sizes import is_known
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, extract


@dataclass(frozen=True)
class Unit:
    """Operators that are compiled together."""

    part: Part
    eager: str
    """Why they are not compiled; '' if they are."""


def units_of(
    graph: ModelGraph, members: Set[Node], blocks: Sequence[Sequence[int]], live: Set[Node], *, inside: bool
) -> list[Unit]:
    """Divide the placed nodes `members` of a stage into the parts of `blocks` (op numbers) that they contain.

    `live`: nodes that may get a gradient; `inside`: all of them do, as backward runs inside the call.
    Units are in an order in which each reads only earlier ones, and draws random numbers in the graph's order.
    """
    nodes = list(graph.nodes.values())
    found = [own for block in blocks if (own := {nodes[op] for op in block} & members)]
    units = []
    for number, own in enumerate(_in_drawing_order(graph, found)):
        part = extract(graph.traced, graph.placement, own, f"Block{number}")
        units.append(Unit(part, why_eager(graph, part, live, inside=inside)))
    return units


def _in_drawing_order(graph: ModelGraph, parts: Iterable[set[Node]]) -> list[set[Node]]:
    """Join neighbours that would draw random numbers in another order than the whole stage, run node by node."""
    order = {node: place for place, node in enumerate(graph.traced.graph.nodes)}
    found: list[set[Node]] = []
    for part in parts:
        joined = set(part)
        while found:
            first = min((order[node] for node in joined & graph.placement.random), default=len(order))
            if not any(order[node] > first for each in found for node in each & graph.placement.random):
                break
            joined |= found.pop()
        found.append(joined)
    return found


def why_eager(graph: ModelGraph, part: Part, live: Set[Node], *, inside: bool) -> str:
    """Why a part of a graph is not compiled; '' if it is. `live` and `inside`: as for `units_of`."""
    for node in part.module.graph.nodes:
        if node.op == "call_function" and operator_name(node.target) == LEAF:
            return f"{_opaque(graph, node)} runs as one operator"
        value = node.meta.get("val")
        values = value if isinstance(value, tuple) else (value,)
        if any(isinstance(each, TensorValue) and not is_known(each) for each in values):
            return "sizes of its values depend on what is computed"
    if not inside and not _all_or_nothing(graph, part, live):
        return "its results have gradients apart from each other, and backward begins outside the call"
    return ""


def _opaque(graph: ModelGraph, leaf: Node) -> str:
    """Description of the user's code that an opaque operator runs."""
    ops = zip(graph.task.ops, graph.nodes.values(), strict=True)
    return next((op.opaque for op, node in ops if op.opaque and node.args[0] == leaf.args[0]), "code of the model")


def _all_or_nothing(graph: ModelGraph, part: Part, live: Set[Node]) -> bool:
    """Whether each result of a part depends on all its inputs and parameters that may get a gradient.

    A compiled backward gives a gradient to all of them, with zeros where none would be: a parameter that is not used
    would be changed by its weight decay.
    """
    found = {frozenset(_sources(graph, part, node)) for node in part.outputs if node in live}
    return len(found) < 2


def _sources(graph: ModelGraph, part: Part, output: Node) -> set[Node | str]:
    """Inputs (nodes) and parameters (names) of a part that an output passes gradients on to."""
    placement, inputs = graph.placement, set(part.inputs)
    found: set[Node | str] = set()
    seen, stack = set[Node](), [output]
    while stack:
        node = stack.pop()
        if node in seen or node not in placement.requires_grad:
            continue
        seen.add(node)
        if node in inputs:
            found.add(node)
        elif node in graph.traced.attributes:
            found.add(graph.traced.attributes[node])
        else:
            stack += (*node.all_input_nodes, *placement.writers.get(node, ()))
    return found
