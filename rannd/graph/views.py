"""Views become reshapes where parts of a graph run.

A trace leaves a copy out (``contiguous()``) where the values it saw already lay without gaps, and a view of them
follows. How a value lies may depend on all that came before (attention lays its result as it is given the query), and
what a part gets from another lies without gaps in its own order of dimensions. So a part reshapes, which copies where
a view cannot be. Only where somebody writes into the memory views stay: a copy would not show it.

The graph itself keeps its views, as the costs of plans know them; but not in regions of its own (no_grad, autocast),
which parts share with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from rannd.graph.effects import Aliases, nested_graph, written

_RESHAPES: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
}


def reshape(node: Node) -> None:
    """Make a reshape of a node that is a view."""
    if node.target in _RESHAPES and not node.kwargs:
        node.target = _RESHAPES[node.target]


def reshape_in_regions(root: GraphModule, inside: bool = False) -> None:
    """Make reshapes of the views in a graph's regions that share no memory with anything that is written into."""
    sharing = Aliases(root)
    touched = {sharing.find(target) for node in root.graph.nodes for target in written(root, node)}
    for node in root.graph.nodes:
        nested = nested_graph(root, node) if node.op == "call_function" else None
        if nested is not None:
            if not any(sharing.find(each) in touched for each in (node, *node.all_input_nodes)):
                reshape_in_regions(nested[0], inside=True)
        elif inside and sharing.find(node) not in touched:
            reshape(node)
