"""What a traced model is: a flat graph of operators, the tensors it reads, and how its outputs are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.fx_names import any_name
from rannd.graph.fx.leaf_op import LeafTable


@dataclass(frozen=True)
class OutputSpec:
    """How the user's output is put together again from the graph's outputs."""

    spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    """Leaf number and value of leaves that are not computed."""
    positions: tuple[int, ...]
    """Leaf number of each output of the graph."""

    def unflatten(self, values: list[Any]) -> Any:
        """The user's output with `values` in the places of the computed leaves."""
        leaves: list[Any] = [None] * (len(self.constants) + len(self.positions))
        for position, value in self.constants.items():
            leaves[position] = value
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Decisions:
    """What the calls that a graph is for decide, see decisions.py."""

    module: GraphModule
    """From the tensors of a call to what it decides by, a bool or a tensor of one element each."""
    values: tuple[bool, ...]

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these tensors, on the graph's device, decides like this.

        A call without rows decides nothing, ask for others only. The tensors are not changed.
        """
        try:
            with torch.no_grad():
                found = self.module(*tensors)
                flags = [value.reshape(()).ne(0) for value in found if isinstance(value, torch.Tensor)]
                told = iter(torch.stack(flags).tolist() if flags else ())
                truths = [next(told) if isinstance(value, torch.Tensor) else value for value in found]
        except (RuntimeError, IndexError, ValueError):
            return False  # it gets another graph, or the model itself raises when it is traced
        return bool(truths == list(self.values))


@dataclass(frozen=True)
class Traced:
    """A traced model.

    `attributes` names, for each get_attr node that holds a tensor, the parameter or buffer (its first name in
    the model; tied names are one) or the constant it reads; `constants` has the values of the latter.
    """

    graph: Graph
    root: nn.Module
    """Has the tensors and inner graphs that get_attr nodes read."""
    outputs: OutputSpec
    attributes: Mapping[Node, str]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """Attributes of modules that the forward changed in vain: no graph shows that."""
    record: tuple[str, ...] = ()
    """What the front-end did, a line for each step: what was tried, what failed, and why."""
    leaves: LeafTable | None = None
    """Submodules that run as single operators, where there are some."""
    holes: tuple[int, ...] = ()
    """Numbers of rows that a rank's mini-batch may not have: the model's code treats them in another way."""
    decisions: Decisions | None = None
    """What calls have to decide for the graph to be theirs; None where it is for all calls of its signature."""
    whole: tuple[int, ...] = ()
    """Arguments that were as long as the batch, but carry no samples."""

    def tensor(self, node: Node) -> torch.Tensor:
        """The parameter, buffer or constant that a get_attr node reads."""
        value = attribute(self.root, str(node.target))
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def leaf_paths(self) -> tuple[str, ...]:
        """Dotted paths of the submodules that run as single operators; '' is the whole model."""
        return self.leaves.paths if self.leaves is not None else ()

    def named(self, name: str) -> torch.Tensor:
        """The tensor behind one of `attributes`' names."""
        return self.tensor(next(node for node, each in self.attributes.items() if each == name))

    def is_state(self, node: Node) -> bool:
        """Whether a node reads a parameter or buffer of the model."""
        return node in self.attributes and self.attributes[node] not in self.constants

    def is_parameter(self, node: Node) -> bool:
        """Whether a node reads a parameter (not a buffer or constant)."""
        return node in self.attributes and isinstance(self.tensor(node), nn.Parameter)

    def trainable(self, node: Node) -> bool:
        """Whether a node reads a tensor that gets a gradient."""
        return self.tensor(node).requires_grad

    @property
    def placeholders(self) -> list[Node]:
        """One node per tensor argument, in the order of the signature."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes whose values are handed back to the user."""
        output: Node = next(iter(reversed(self.graph.nodes)))
        nodes: tuple[Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        return nodes


def retarget(traced: Traced, device: torch.device) -> Traced:
    """Let every operator that names a device (tensors made on the way) make its result on `device`."""
    with any_name():
        _retarget(traced.graph, traced.root, device)
        if traced.decisions is not None:
            module = traced.decisions.module
            _retarget(module.graph, module, device)
            module.recompile()
            module.to(device)  # its constants
    return traced


def _retarget(graph: Graph, root: nn.Module, device: torch.device) -> None:
    def replaced(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        if node.op == "call_function":  # devices are arguments of their own, never inside lists
            if any(isinstance(value, torch.device) for value in node.args):
                node.args = tuple(replaced(value) for value in node.args)
            if any(isinstance(value, torch.device) for value in node.kwargs.values()):
                node.kwargs = {name: replaced(value) for name, value in node.kwargs.items()}
        elif node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                _retarget(inner.graph, inner, device)
                inner.recompile()


def attribute(root: nn.Module, target: str) -> Any:
    """The attribute of `root` with a dotted name."""
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
