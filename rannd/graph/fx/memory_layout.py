"""How values lie in memory, where a graph runs on others than it was traced with.

Views become reshapes where parts of a graph run.

A trace leaves a copy out (``contiguous()``) where the values it saw already lay without gaps, and a view of them
follows. How a value lies may depend on all that came before (attention lays its result as it is given the query), and
what a part gets from another lies without gaps in its own order of dimensions. So a part reshapes, which copies where
a view cannot be. Only where somebody writes into the memory views stay: a copy would not show it.

The graph itself keeps its views, as the costs of plans know them; but not in regions of its own (no_grad, autocast),
which parts share with it.

Code that is not traced (custom operators, opaque modules) may read memory as it lies, as a Triton kernel and
``as_strided`` do. It gets tensors without gaps where it got such when the model was traced: the user's ``contiguous()``
before it, or a branch on ``is_contiguous()``, is not in the graph.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rannd.graph.fx.aliasing import Aliases, nested_graph, written
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import is_whole_model
from rannd.graph.fx.traced import attribute, operator_name

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


def without_gaps(root: GraphModule) -> frozenset[Node]:
    """What operators that may read memory as it lies got without gaps in the trace, regions included.

    The nodes' values have to be those of torch's own tracing, which know how tensors lie.
    """
    found: set[Node] = set()
    for node in root.graph.nodes:
        if node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                found |= without_gaps(inner)
        elif _reads_memory(node):
            found |= {
                each for each in node.all_input_nodes if each.op != "get_attr" and _is_dense(each.meta.get("val"))
            }
    return frozenset(found)


def keep_without_gaps(root: GraphModule, dense: Set[Node]) -> None:
    """Let those operators get what is in `dense` without gaps in every call.

    What shares memory with something that is written into stays as it is: a copy would not be seen.
    """
    reading = [node for node in root.graph.nodes if _reads_memory(node)]
    if reading:
        sharing = Aliases(root)
        touched = {sharing.find(target) for node in root.graph.nodes for target in written(root, node)}
        own = {each for each in dense if each.graph is root.graph and sharing.find(each) not in touched}
        for node in reading:
            _lay(root, node, own)
    for node in root.graph.nodes:
        if node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                keep_without_gaps(inner, dense)


def _reads_memory(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = operator_name(node.target)
    if name == LEAF:
        return not is_whole_model(str(node.args[0]))  # which runs its own code before
    return node.target.namespace not in ("aten", "prims", "rannd") or name.startswith("aten::as_strided")


def _lay(root: GraphModule, node: Node, dense: Set[Node]) -> None:
    def laid(operand: Node) -> Node:
        if operand not in dense:
            return operand
        with root.graph.inserting_before(node):
            made = root.graph.call_function(torch.ops.aten.contiguous.default, (operand,))
        made.meta = dict(operand.meta)
        return made

    node.args, node.kwargs = map_arg(node.args, laid), map_arg(node.kwargs, laid)


def _is_dense(value: object) -> bool:
    """Whether a tensor has no gaps, without asking (and so deciding) how large an unknown size is."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        length, step = (
            sympy.sympify(each.node.expr if isinstance(each, torch.SymInt) else each) for each in (size, stride)
        )
        if length == 1:
            continue
        if sympy.expand(step - expected) != 0:
            return False
        expected *= length
    return True
