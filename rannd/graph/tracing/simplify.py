"""Remove redundant work from a graph without changing its results.

Language models often compute `logits[:, :-1]` on their largest tensor. Export adds a slice of the whole batch
dimension, and the last position is computed only to be dropped. The backward of each slice fills a tensor of the full
size with zeros and copies into it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import attribute

_SLICE = torch.ops.aten.slice.Tensor
_LINEAR = torch.ops.aten.linear.default


def simplify(root: GraphModule) -> None:
    """Simplify a graph of ATen operators and its nested graphs in place; metadata have to be plain data."""
    for node in list(root.graph.nodes):
        if node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                simplify(inner)
        elif node.target is _SLICE and not node.kwargs:
            if _takes_all(node):
                node.replace_all_uses_with(node.args[0])
                root.graph.erase_node(node)
            else:
                _slice_before_linear(root.graph, node)


def _takes_all(node: Node) -> bool:
    """Whether a slice takes a whole dimension, so that its result equals its input."""
    given: list[Any] = list(node.args)[2:]
    start, end, step = given + [None, None, 1][len(given) :]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize)) and step == 1


def _slice_before_linear(graph: Graph, node: Node) -> None:
    """Rewrite ``linear(x)[:, a:b]`` to ``linear(x[:, a:b])``: the slice is taken of the smaller tensor.

    Only if nothing else uses the linear, it has more output than input features, and the slice is not along the batch
    dimension. The new result is contiguous while the slice was not, which matters only to users that read strides.
    """
    given: list[Any] = list(node.args)
    linear, dim, bounds = given[0], given[1] if len(given) > 1 else 0, given[2:]
    if not isinstance(linear, Node) or linear.target is not _LINEAR or len(linear.users) > 1:
        return
    x, weight = linear.args[:2]
    taken, matrix, result = _tensor(x), _tensor(weight), _tensor(node)
    if taken is None or matrix is None or result is None:
        return
    rows, columns = matrix.shape
    if not all(bound is None or isinstance(bound, int) for bound in (*bounds, dim)):
        return
    place = dim % result.ndim
    if not 0 < place < result.ndim - 1 or not (isinstance(rows, int) and isinstance(columns, int) and rows > columns):
        return
    if any("as_strided" in str(user.target) for user in node.users):
        return
    shape = (*taken.shape[:place], result.shape[place], *taken.shape[place + 1 :])
    with graph.inserting_before(linear):  # later, `x` may have been written in place
        shorter = graph.call_function(_SLICE, (x, place, *bounds))
        moved = graph.call_function(_LINEAR, (shorter, *linear.args[1:]))
    shorter.meta = {**node.meta, "val": replace(taken, shape=shape)}
    moved.meta = {**linear.meta, "val": result}
    node.replace_all_uses_with(moved)
    graph.erase_node(node)
    graph.erase_node(linear)


def _tensor(node: Any) -> TensorValue | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, TensorValue) else None
