"""Traced models: a flat graph of operators, the tensors it reads, and the structure of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.call.unread import name_passed_on
from rannd.graph.fx.leaf_op import LeafTable


@dataclass(frozen=True)
class OutputSpec:
    """How to rebuild the user's output from the graph's outputs."""

    spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    """Leaf index to value, for leaves that are not computed."""
    positions: tuple[int, ...]
    """Leaf index of each output of the graph."""
    host: tuple[int, ...] = ()
    """Those of them that the model returns on the CPU, and a graph for another device on that."""

    @property
    def passed_on(self) -> set[str]:
        """Names of the arguments that the model returns as it got them."""
        return {name for value in self.constants.values() if (name := name_passed_on(value)) is not None}

    def unflatten(self, values: list[Any], arguments: Mapping[str, Any] | None = None) -> Any:
        """Rebuild the user's output with `values` as the computed leaves; `arguments`: those that are passed on."""
        leaves: list[Any] = [None] * (len(self.constants) + len(self.positions))
        for position, value in self.constants.items():
            name = name_passed_on(value) if arguments else None
            leaves[position] = value if name is None or arguments is None else arguments[name]
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value.cpu() if position in self.host and isinstance(value, torch.Tensor) else value
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Decisions:
    """Outcomes of the data-dependent branches for which a graph is valid, see branches/data_dependent.py."""

    module: GraphModule
    """Computes the branch conditions from a call's tensors; each is a bool or a one-element tensor."""
    values: tuple[bool, ...]
    modules: tuple[str, ...]
    """Dotted path of the module that branches, for each of them."""

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these tensors, on the graph's device, takes the same branches.

        Not meant for calls with zero rows. The tensors are not modified.
        """
        try:
            with torch.no_grad():
                found = self.module(*tensors)
                flags = [value.reshape(()).ne(0) for value in found if isinstance(value, torch.Tensor)]
                told = iter(torch.stack(flags).tolist() if flags else ())
                truths = [next(told) if isinstance(value, torch.Tensor) else value for value in found]
        except (RuntimeError, IndexError, ValueError):
            return False  # the call gets another graph, or the model raises the error itself during tracing
        return bool(truths == list(self.values))

    def inputs(self, branch: int) -> set[int]:
        """Numbers of the tensors that the condition of a branch is computed from."""
        (output,) = self.module.graph.find_nodes(op="output")
        stack, seen = [output.args[0][branch]], set[Any]()
        while stack:
            node = stack.pop()
            if isinstance(node, Node) and node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
        places = self.module.graph.find_nodes(op="placeholder")
        return {number for number, place in enumerate(places) if place in seen}


@dataclass(frozen=True)
class Traced:
    """A traced model.

    `attributes` maps each get_attr node of a tensor to the name of the parameter or buffer (for tied tensors the first
    name in the model) or constant it reads; `constants` has the values of the latter.
    """

    graph: Graph
    root: nn.Module
    """Holds the tensors and subgraphs that get_attr nodes read."""
    outputs: OutputSpec
    attributes: Mapping[Node, str]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """Module attributes that forward changed; the graph does not reproduce these changes."""
    record: tuple[str, ...] = ()
    """Log of the tracing front-end, one line per attempt: what was tried, what failed, and why."""
    leaves: LeafTable | None = None
    """Submodules that run as opaque operators, None if there are none."""
    holes: tuple[int, ...] = ()
    """Batch sizes per rank for which the graph is not valid, because the model's code treats them differently."""
    decisions: Decisions | None = None
    """Branch outcomes that a call must have to use the graph; None: valid for all calls of its signature."""
    whole: tuple[int, ...] = ()
    """Indices of tensor arguments that have as many rows as the batch but do not carry samples."""

    def tensor(self, node: Node) -> torch.Tensor:
        """The parameter, buffer or constant that a get_attr node reads."""
        value = attribute(self.root, str(node.target))
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def leaf_paths(self) -> tuple[str, ...]:
        """Dotted paths of the submodules that run as opaque operators; '' is the whole model."""
        return self.leaves.paths if self.leaves is not None else ()

    def named(self, name: str) -> torch.Tensor:
        """The tensor with one of the names in `attributes`."""
        return self.tensor(next(node for node, each in self.attributes.items() if each == name))

    def is_state(self, node: Node) -> bool:
        """Whether a node reads a parameter or buffer of the model."""
        return node in self.attributes and self.attributes[node] not in self.constants

    def is_parameter(self, node: Node) -> bool:
        """Whether a node reads a parameter (not a buffer or constant)."""
        return node in self.attributes and isinstance(self.tensor(node), nn.Parameter)

    def trainable(self, node: Node) -> bool:
        """Whether a node reads a tensor that requires a gradient."""
        return self.tensor(node).requires_grad

    @property
    def placeholders(self) -> list[Node]:
        """One node per tensor argument, in the order of the signature."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes whose values are returned to the user."""
        output: Node = next(iter(reversed(self.graph.nodes)))
        nodes: tuple[Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        return nodes


def attribute(root: nn.Module, target: str) -> Any:
    """Get an attribute of `root` by its dotted name."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def operator_name(target: Callable[..., Any] | str) -> str:
    """'aten::linear' for a default overload, 'aten::add.Tensor' for others, a dotted name for Python functions."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call of an ATen operator by the names of its schema, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    named: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named
