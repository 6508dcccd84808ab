"""Run a graph node by node, and note what each value really is: bytes, whether it has a gradient, operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pieces import weights_of
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from rannd.graph.fx.traced import attribute
from rannd.graph.model import ModelGraph


@dataclass(frozen=True)
class Truth:
    """What was seen of one node's value."""

    bytes: int
    requires_grad: bool
    flops: int
    """Operations that torch's own counter counts: products, convolutions and attention alone."""


def truths(graph: ModelGraph, tensors: Sequence[Tensor]) -> dict[str, Truth]:
    """The truth of every plain tensor in the graph, by the name of its node."""
    rows = graph.signature.rows(tensors)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    given = [*leaves, *weights_of(graph, tensors, rows, rows)]
    values: dict[Node, Any] = dict(zip(graph.traced.placeholders, given, strict=True))
    found: dict[str, Truth] = {}
    for node in graph.traced.graph.nodes:
        flops = 0
        if node.op == "get_attr":
            values[node] = attribute(graph.traced.root, str(node.target))
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with FlopCounterMode(display=False) as counter:
                values[node] = node.target(*args, **kwargs)
            flops = counter.get_total_flops()
        if node.op in ("placeholder", "call_function") and isinstance(values[node], Tensor):
            tensor = values[node]
            found[node.name] = Truth(tensor.numel() * tensor.element_size(), tensor.requires_grad, flops)
    return found
