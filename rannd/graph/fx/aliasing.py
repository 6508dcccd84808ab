"""Side effects of nodes: in-place writes, aliasing, random numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule, Node

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import Traced, arguments, attribute, operator_name

# Operators that may return an argument itself or an alias although their schema does not say so.
_MAY_RETURN_ARGUMENT = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "type_as", "to",
                        "contiguous", "reshape", "flatten", "einsum", "pad", "conj", "resolve_conj", "resolve_neg",
                        "expand_as", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "real",
                        "pin_memory", "cat", "repeat", "tile", "unflatten")  # fmt: skip


def base_name(node: Node) -> str:
    """Name of an ATen operator without namespace and overload."""
    return operator_name(node.target).removeprefix("aten::").split(".")[0]


def nested_graph(traced: Traced | nn.Module, node: Node) -> tuple[GraphModule, list[Any]] | None:
    """Return (subgraph, arguments) of a no_grad or autocast region, None for plain operators."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    root = traced.root if isinstance(traced, Traced) else traced
    for place, argument in enumerate(node.args):
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = attribute(root, str(argument.target))
            if isinstance(inner, GraphModule):
                return inner, list(node.args[place + 1 :])
    return None


def written(traced: Traced | nn.Module, node: Node) -> list[Node]:
    """Arguments that a node writes in place."""
    if node.op != "call_function":
        return []
    nested = nested_graph(traced, node)
    if nested is not None:
        return list(_written_inside(*nested))
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    named = arguments(node)
    name = base_name(node)
    if (name == "batch_norm" and named["training"]) or (name == "instance_norm" and named["use_input_stats"]):
        return [named[key] for key in ("running_mean", "running_var") if isinstance(named[key], Node)]
    found: list[Node] = []
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [leaf for leaf in pytree.tree_leaves(named.get(argument.name)) if isinstance(leaf, Node)]
    return found


def _written_inside(inner: GraphModule, given: list[Any]) -> Iterator[Node]:
    sharing = Aliases(inner)
    touched = {sharing.find(target) for node in inner.graph.nodes for target in written(inner, node)}
    placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
    for placeholder, argument in zip(placeholders, given, strict=True):
        if isinstance(argument, Node) and sharing.find(placeholder) in touched:
            yield argument


def _returned_inside(inner: GraphModule, given: list[Any]) -> Iterator[Node]:
    """Arguments of a subgraph that its results may alias."""
    sharing = Aliases(inner)
    output = next(iter(reversed(inner.graph.nodes)))
    returned = {sharing.find(node) for node in output.all_input_nodes}
    placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
    for placeholder, argument in zip(placeholders, given, strict=True):
        if isinstance(argument, Node) and sharing.find(placeholder) in returned:
            yield argument


def is_leaf(node: Node) -> bool:
    """Whether a node runs code that cannot be traced."""
    return operator_name(node.target) == LEAF


def is_random(traced: Traced | nn.Module, node: Node) -> bool:
    """Whether a node draws random numbers."""
    nested = nested_graph(traced, node)
    if nested is not None:
        return any(is_random(nested[0], inner) for inner in nested[0].graph.nodes)
    if is_leaf(node):
        return True  # unknown, so it is treated as random
    if not is_random_operator(node.target):
        return False
    named = arguments(node)
    if "train" in named:
        return bool(named["train"]) and named.get("p", named.get("dropout", 1.0)) != 0
    if "dropout_p" in named:
        return bool(named["dropout_p"] != 0)
    return not (base_name(node) == "rrelu" and not named["training"])


def is_random_operator(target: object) -> bool:
    """Whether an operator may use torch's random number generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


class Aliases:
    """Disjoint sets of nodes that may share memory."""

    def __init__(self, traced: Traced | GraphModule) -> None:
        self._parent: dict[Node, Node] = {}
        for node in traced.graph.nodes:
            for other in self._sources(traced, node):
                self._parent[self.find(node)] = self.find(other)

    def find(self, node: Node) -> Node:
        """Return the representative of the node's set."""
        while True:
            above = self._parent.setdefault(node, node)
            if above is node:
                return node
            self._parent[node] = self._parent.setdefault(above, above)
            node = above

    @staticmethod
    def _sources(traced: Traced | nn.Module, node: Node) -> list[Node]:
        if node.op != "call_function":
            return []
        nested = nested_graph(traced, node)
        if nested is not None:
            return list(_returned_inside(*nested))
        if node.target is operator.getitem:
            return [
                source for source in node.all_input_nodes if isinstance(source.meta.get("val"), (TensorValue, tuple))
            ]
        if not isinstance(node.target, torch._ops.OpOverload):
            return []
        schema = node.target._schema
        if base_name(node) in _MAY_RETURN_ARGUMENT:
            return [
                source for source in node.all_input_nodes if isinstance(source.meta.get("val"), (TensorValue, tuple))
            ]
        if not any(result.alias_info is not None for result in schema.returns):
            return []
        named = arguments(node)
        return [
            leaf
            for argument in schema.arguments
            if argument.alias_info is not None
            for leaf in pytree.tree_leaves(named.get(argument.name))
            if isinstance(leaf, Node)
        ]
