"""Keep subgraphs correct when the strides of their inputs differ from those seen during tracing.

In subgraphs, views become reshapes. A trace omits ``contiguous()`` if the traced value was contiguous already, and a
view of it follows. The strides of a value may depend on everything before it (the output of attention has the
strides of its query), and a value received from another stage is contiguous. So subgraphs use reshape, which copies
if no view is possible. Only views of memory that is written in place stay views: a copy would lose the write.

The traced graph itself keeps its views, since costs of plans refer to them; but not in no_grad and autocast regions,
which subgraphs share with it.

Code that is not traced (custom operators, opaque modules) may depend on strides, as Triton kernels and ``as_strided``
do. It gets contiguous tensors wherever it got contiguous ones during tracing, because the user's ``contiguous()`` or
branch on ``is_contiguous()`` before it is not in the graph.
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
    """Turn a view node into a reshape, in place."""
    if node.target in _RESHAPES and not node.kwargs:
        node.target = _RESHAPES[node.target]


def reshape_in_regions(root: GraphModule, inside: bool = False) -> None:
    """Turn views inside no_grad and autocast regions into reshapes, unless they alias memory written in place."""
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
    """Inputs of stride-dependent operators that were contiguous in the trace, nested regions included.

    The nodes' values must still be torch's fake tensors, which have strides.
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
    """Insert ``contiguous`` before stride-dependent operators for their inputs in `dense`.

    Inputs that alias memory written in place are left alone: a copy would lose the write.
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
        return not is_whole_model(str(node.args[0]))  # the whole model gets the caller's tensors
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
    """Whether a tensor is contiguous, checked symbolically so that no guard on an unknown size is added."""
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
