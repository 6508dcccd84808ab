"""Decide which nodes are placed on a stage, which are recomputed by every reader, and which must stay together.

*Recomputed* nodes are cheap to duplicate: those that depend on no tensor argument (weight transposes, positions) and
gradient-free ones computed from arguments alone (masks, shifted labels). All others are *placed*, and grouped by
rules that keep a partitioned graph correct:

1. a node with several results, or with a result of unknown size, stays with its readers;
2. a node that writes into a value in place stays with the nodes that alias it or read it before;
3. readers and writers of a buffer (or argument) that is written in place stay together;
4. a node that reads memory by strides (``as_strided``) stays with all nodes that determine the strides of its operand:
   a value received from another stage is contiguous and would be read in the wrong order;
5. a node whose result the model keeps on the CPU, in a graph for another device, stays with its readers: ranks send
   what is on their device.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch.fx import Node

from rannd.errors import TraceError
from rannd.graph.call.signature import Signature
from rannd.graph.fx.aliasing import Aliases, base_name, is_random, nested_graph, written
from rannd.graph.fx.flops import forward_flops
from rannd.graph.fx.sizes import is_known, is_number, is_plain_tensor, numel_at
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import Traced, operator_name

CHEAP_FLOPS_PER_ELEMENT = 16
"""Maximum FLOPs per result element of a recomputed node; a matrix product costs more."""

_WITHOUT_GAPS = ("linear", "embedding", "addmm", "mm", "bmm")
"""Operators whose results are contiguous, whatever the strides of their operands.
``contiguous`` is another, unless called with a memory format."""


@dataclass(frozen=True)
class Placement:
    """Result of `place`, keyed by nodes of the traced graph."""

    placed: tuple[Node, ...]
    group: Mapping[Node, int]
    """Group number of each placed node; nodes of one group stay on one stage."""
    recomputed: Set[Node]
    early: Set[Node]
    """Arguments, and recomputed nodes computed from arguments and constants alone."""
    requires_grad: Set[Node]
    reads: Mapping[Node, tuple[Node, ...]]
    """Placed nodes and arguments that a placed node reads, directly or through recomputed ones, in graph order."""
    attributes: Mapping[Node, tuple[Node, ...]]
    """get_attr nodes of tensors that a placed node reads, directly or through recomputed ones."""
    written: Set[str]
    """Names of parameters and buffers that the graph writes in place."""
    random: Set[Node]
    writers: Mapping[Node, tuple[Node, ...]]
    """Nodes that write in place into the memory of a node, through which its value and gradient flow, too."""


def place(traced: Traced, signature: Signature) -> Placement:
    """Compute the placement of the nodes of a traced model."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    sharing = Aliases(traced)
    writes = {node: targets for node in nodes if (targets := written(traced, node))}
    touched = {sharing.find(target) for targets in writes.values() for target in targets}
    random = {node for node in nodes if is_random(traced, node)}
    gradients = _requires_grad(traced, signature, sharing, writes)
    recomputed, early = _recomputed(traced, sharing, touched, random, set(writes), gradients)
    placed = tuple(node for node in nodes if node not in recomputed)

    reads: dict[Node, tuple[Node, ...]] = {}
    attributes: dict[Node, tuple[Node, ...]] = {}
    sources: dict[Node, tuple[frozenset[Node], frozenset[Node]]] = {}
    for node in nodes:
        values: set[Node] = set()
        tensors: set[Node] = set()
        for source in node.all_input_nodes:
            if is_number(source.meta.get("val")):
                continue
            if source.op == "get_attr":
                if source in traced.attributes:
                    tensors.add(source)
            elif source in recomputed:
                values |= sources[source][0]
                tensors |= sources[source][1]
            else:
                values.add(source)
        if node in recomputed:
            sources[node] = (frozenset(values), frozenset(tensors))
        else:
            reads[node] = tuple(sorted(values, key=order.__getitem__))
            attributes[node] = tuple(sorted(tensors, key=order.__getitem__))

    group = _groups(traced, placed, order, sharing, touched, writes)
    names = {traced.attributes[node] for node in traced.attributes if sharing.find(node) in touched}
    trained = sorted(
        name
        for node, name in traced.attributes.items()
        if node in gradients and _trains_through(node, sharing, touched)
    )
    if trained:
        raise TraceError(
            f"the model writes into {trained[0]} while it is trained by it; write into it between calls, or freeze it "
            "(requires_grad_(False))"
        )
    by_set: dict[Node, list[Node]] = {}
    for node, targets in writes.items():
        for target in targets:
            by_set.setdefault(sharing.find(target), []).append(node)
    writers = {node: tuple(by_set[sharing.find(node)]) for node in order if sharing.find(node) in by_set}
    return Placement(placed, group, recomputed, early, gradients, reads, attributes, names, random, writers)


def _trains_through(parameter: Node, sharing: Aliases, touched: Set[Node]) -> bool:
    """Whether a trainable parameter that is written in place is also read with gradients enabled."""
    home = sharing.find(parameter)
    if home not in touched:
        return False
    members = [node for node in parameter.graph.nodes if sharing.find(node) is home]
    return any(user not in members and not _without_gradients(user) for node in members for user in node.users)


def _without_gradients(node: Node) -> bool:
    """Whether a node runs a no_grad subgraph."""
    return operator_name(node.target) == "higher_order::wrap_with_set_grad_enabled" and node.args[0] is False


def _requires_grad(
    traced: Traced, signature: Signature, sharing: Aliases, writes: Mapping[Node, list[Node]]
) -> set[Node]:
    """Nodes whose value may require a gradient (the flags recorded by tracing are unreliable).

    After an in-place write, all aliases of the written tensor may require a gradient.
    """
    found: set[Node] = set()
    if not signature.mode.grad:
        return found
    reached: set[Node] = set()
    size = -1
    while size != len(reached):
        size = len(reached)
        given = iter(signature.tensors)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                spec = next(given, None)  # placeholders after the arguments are loss weights
                if spec is not None and spec.requires_grad:
                    found.add(node)
            elif node.op == "get_attr" and node in traced.attributes and traced.trainable(node):
                found.add(node)
            elif node.op == "call_function" and (
                _differentiable(node)
                and (sharing.find(node) in reached or any(source in found for source in node.all_input_nodes))
            ):
                found.add(node)
                reached |= {sharing.find(target) for target in writes.get(node, ())}
    return found


def _differentiable(node: Node) -> bool:
    """Whether a node propagates gradients."""
    name = base_name(node)
    if (
        name in ("detach", "detach_")
        or name.endswith("_like")
        or name.startswith("new_")
        or (operator_name(node.target) == "higher_order::wrap_with_set_grad_enabled" and node.args[0] is False)
    ):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, tuple) else [value]
    return any(isinstance(v, TensorValue) and (v.is_floating_point() or v.is_complex()) for v in values)


def _recomputed(
    traced: Traced,
    sharing: Aliases,
    touched: Set[Node],
    random: Set[Node],
    writers: Set[Node],
    gradients: Set[Node],
) -> tuple[set[Node], set[Node]]:
    recomputed: set[Node] = set()
    depends: set[Node] = set(traced.placeholders)
    pure: set[Node] = set(traced.placeholders)  # computed from arguments and constants alone
    results = set(traced.results)
    for node in traced.graph.nodes:
        if node.op == "get_attr" and not traced.is_state(node):
            pure.add(node)
        if node.op != "call_function":
            continue
        if is_number(node.meta.get("val")):
            recomputed.add(node)
            continue
        tensors = [source for source in node.all_input_nodes if not is_number(source.meta.get("val"))]
        if any(source in depends for source in tensors):
            depends.add(node)
        if all(source in pure for source in tensors):
            pure.add(node)
        if (
            not _sized(node)
            or node in results
            or node in random
            or node in writers
            or any(sharing.find(other) in touched for other in (node, *tensors))
            or any(source.op == "call_function" and source not in recomputed for source in tensors)
        ):
            continue
        light = node not in gradients and _cheap(traced, node) and not any(traced.is_parameter(s) for s in tensors)
        if node not in depends or light:
            recomputed.add(node)
    return recomputed, set(traced.placeholders) | (recomputed & pure)


def _sized(node: Node) -> bool:
    """Whether all results of a node are tensors of known size."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple) else [value]
    return bool(values) and all(isinstance(v, TensorValue) and is_known(v) for v in values)


def _cheap(traced: Traced, node: Node) -> bool:
    nested = nested_graph(traced, node)
    if nested is not None:
        return all(_cheap(traced, inner) for inner in nested[0].graph.nodes if inner.op == "call_function")
    made = node.meta.get("val")
    values = made if isinstance(made, (tuple, list)) else [made]
    elements = sum(numel_at(value, 2) for value in values if isinstance(value, TensorValue))
    return forward_flops(node, 2) <= CHEAP_FLOPS_PER_ELEMENT * max(elements, 1)


def _groups(
    traced: Traced,
    placed: tuple[Node, ...],
    order: Mapping[Node, int],
    sharing: Aliases,
    touched: Set[Node],
    writes: Mapping[Node, list[Node]],
) -> dict[Node, int]:
    members = set(placed)
    parent: dict[Node, Node] = {node: node for node in placed}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(nodes: list[Node]) -> None:
        for node in nodes[1:]:
            parent[find(node)] = find(nodes[0])

    for node in placed:
        if not is_plain_tensor(node) or node.meta["val"].host:
            join([node, *(user for user in node.users if user in members)])

    for node in placed:
        if _reads_by_strides(traced, node):
            join([node, *(other for other in _deciding_strides(node) if other in members)])

    sets: dict[Node, list[Node]] = {}
    for node in traced.graph.nodes:
        if node.op != "output" and sharing.find(node) in touched:
            sets.setdefault(sharing.find(node), []).append(node)
    for nodes in sets.values():
        shared = set(nodes)
        writers = [node for node, targets in writes.items() if any(target in shared for target in targets)]
        last = max(order[node] for node in writers)
        # Reads of an argument or buffer after the write can see the new content only on the same stage.
        rooted = any(node.op in ("placeholder", "get_attr") for node in nodes)
        together = [node for node in nodes if node in members and (rooted or order[node] <= last)]
        for node in nodes:
            together += [user for user in node.users if user in members and (rooted or order[user] <= last)]
        join(list(dict.fromkeys([*writers, *together])))
    numbers: dict[Node, int] = {}
    return {node: numbers.setdefault(find(node), len(numbers)) for node in placed}


def _reads_by_strides(traced: Traced, node: Node) -> bool:
    nested = nested_graph(traced, node)
    if nested is not None:
        return any(_reads_by_strides(traced, inner) for inner in nested[0].graph.nodes if inner.op == "call_function")
    return base_name(node).startswith("as_strided")


def _deciding_strides(node: Node) -> set[Node]:
    """Ancestors of a node that determine the strides of what it reads."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if (
                source.op == "call_function"
                and source not in found
                and not is_number(source.meta.get("val"))
                and base_name(source) not in _WITHOUT_GAPS
                and not (base_name(source) == "contiguous" and len(source.args) == 1 and not source.kwargs)
            ):
                found.add(source)
                stack.append(source)
    return found
