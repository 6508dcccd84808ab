"""Kinds of units: equal operators on tensors of equal layouts, which are compiled once.

A unit's graph is written anew without names of the model, with its numbers as constants. Two units are of one kind if
these graphs and the layouts of their arguments are equal, whatever layers they come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.call.signature import Mode
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import attribute
from rannd.graph.partition.cut import Part
from rannd.graph.partition.graph_hash import text_of


@dataclass(frozen=True)
class TensorLayout:
    """What compiled code relies on about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    parameter: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        """The layout of a tensor."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return TensorLayout(tensor.dtype, shape, stride, tensor.requires_grad, isinstance(tensor, nn.Parameter))

    def tensor(self, device: torch.device) -> torch.Tensor:
        """A new tensor of this layout: small positive numbers, zeros for integers, True for masks."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        value = 0.01 if self.dtype.is_floating_point or self.dtype.is_complex else int(self.dtype is torch.bool)
        base = torch.full((max(extent, 0) if 0 not in self.shape else 0,), value, dtype=self.dtype, device=device)
        made = base.as_strided(self.shape, self.stride).detach()
        return nn.Parameter(made, self.requires_grad) if self.parameter else made.requires_grad_(self.requires_grad)


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of unit."""

    digest: str
    """Equal for equal kinds, in every process."""
    module: GraphModule
    """``module(*values, *tensors)`` returns the outputs of the unit."""
    arguments: tuple[TensorLayout, ...]
    grad: bool
    """Whether autograd records."""
    mode: Mode
    rows: int


def kind_of(
    part: Part, rows: int, live: Set[Node], arguments: Sequence[TensorLayout], mode: Mode, *, grad: bool
) -> Kind:
    """The kind of a unit for pieces of `rows` rows; outputs outside of `live` get no gradient."""
    module = _plain(part, rows, live if grad else set(part.outputs))
    text = f"{text_of(module)}|{[repr(each) for each in arguments]}|{grad}|{mode.autocast}|{rows}"
    return Kind(hashlib.sha256(text.encode()).hexdigest(), module, tuple(arguments), grad, mode, rows)


def _plain(part: Part, rows: int, live: Set[Node]) -> GraphModule:
    """The graph of a part without names of the model, for a number of rows."""
    graph = Graph()
    copies: dict[Node, Any] = {}
    regions: dict[str, nn.Module] = {}
    places = part.module.graph.find_nodes(op="placeholder")
    taken = len(part.inputs) + len(part.tensors)
    copies.update(zip(places[taken:], part.numbers_at(rows), strict=True))
    for number, node in enumerate(part.module.graph.nodes):
        if node in copies:
            continue
        if node.op == "output":
            graph.output(
                tuple(
                    copies[inner] if made in live or not _may_record(made) else _detached(graph, copies[inner])
                    for inner, made in zip(node.args[0], part.outputs, strict=True)
                )
            )
            continue
        target = f"{node.op[0]}{number}" if node.op == "placeholder" else node.target
        if node.op == "get_attr":
            target = f"region{len(regions)}"
            regions[target] = attribute(part.module, str(node.target))
        args = torch.fx.node.map_arg(node.args, copies.__getitem__) if node.op != "placeholder" else ()
        kwargs = torch.fx.node.map_arg(node.kwargs, copies.__getitem__)
        copies[node] = graph.create_node(node.op, target, args, kwargs, name=f"n{number}")
    return GraphModule(regions, graph, "Block")


def _detached(graph: Graph, value: Node) -> Node:
    return graph.call_function(torch.ops.aten.detach.default, (value,))


def _may_record(node: Node) -> bool:
    """Whether autograd may record how a node's value was made."""
    value = node.meta.get("val")
    return not isinstance(value, TensorValue) or value.is_floating_point() or value.is_complex()
