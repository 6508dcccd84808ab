"""Which operators of a part of a graph have a backward in two halves, and the part with these in place.

An operator separates if its weight (and bias) are parameters, or views and casts of parameters, and if everything else
that reads the same parameters separates, too: otherwise their gradients would be accumulated in both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.direct_calls import direct_module
from rannd.graph.fx.traced import arguments
from rannd.graph.partition.cut import Part
from rannd.graph.weight_gradients import deferred_ops

aten = torch.ops.aten

_VIEWS: Collection[Callable[..., Any]] = frozenset({
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default,
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
    aten.to.dtype, aten._to_copy.default,
})  # fmt: skip
"""Views and casts, which autograd's engine differentiates in the second half."""

_CONVOLUTIONS: Collection[Callable[..., Any]] = frozenset({
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
})  # fmt: skip
"""Those with numbers for padding."""


@dataclass(frozen=True)
class _Call:
    """A call that can take an operator's place."""

    function: Callable[..., Any]
    data: Any
    """What the first half gives a gradient to."""
    parameters: tuple[Node, ...]
    """What the second half gives a gradient to."""
    values: tuple[Any, ...]
    """Arguments behind queue and group."""


@dataclass(frozen=True)
class SeparatedPart:
    """A part of a graph whose backward comes in two halves."""

    module: GraphModule
    """Takes the arguments of the part's own module, and a `WeightQueue`."""
    names: frozenset[str]
    """Parameters whose gradients the queue computes; those of all others are computed in the first half."""


def separate(part: Part, parameters: Collection[str]) -> SeparatedPart | None:
    """Return `part` with a backward in two halves; None if nothing of it separates.

    `parameters`: names of the tensors of the part that are parameters.
    """
    nodes = list(part.module.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"][len(part.inputs) :]
    name_of = {node: name for node, name in zip(places, part.tensors, strict=False) if name in parameters}
    origin = dict(zip(name_of, name_of, strict=True))
    """Parameter that a node is, or is a view or a cast of."""
    calls: dict[Node, _Call] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target in _VIEWS and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in origin:
            origin[node] = origin[node.all_input_nodes[0]]
        call = _call(node)
        if call is not None and all(each in origin for each in call.parameters):
            calls[node] = call
    while True:
        whole = {origin[node] for node in origin if any(_reads_whole(user, node, origin, calls) for user in node.users)}
        left = {
            node: call for node, call in calls.items() if not any(origin[each] in whole for each in call.parameters)
        }
        if len(left) == len(calls):
            break
        calls = left
    if not calls:
        return None
    groups = _groups([[origin[each] for each in call.parameters] for call in calls.values()])
    module = _rewritten(part, calls, dict(zip(calls, groups, strict=True)))
    read = {origin[each] for call in calls.values() for each in call.parameters}
    return SeparatedPart(module, frozenset(name_of[node] for node in read))


def _reads_whole(user: Node, read: Node, origin: Mapping[Node, Node], calls: Mapping[Node, _Call]) -> bool:
    """Whether a reader of a parameter, or of a view of it, gives it a gradient in the first half."""
    if user in origin:
        return False
    call = calls.get(user)
    return call is None or read is call.data


def _call(node: Node) -> _Call | None:
    """What can take the place of an operator if its weight and bias are parameters; None for all others."""
    given = arguments(node)
    if node.target is aten.linear.default:
        x, *read = (given[name] for name in ("input", "weight", "bias"))
        return _checked(deferred_ops.linear, x, read, (x, *read))
    if node.target is aten.addmm.default and given["beta"] == given["alpha"] == 1:
        bias, x, weight = (given[name] for name in ("self", "mat1", "mat2"))
        return _checked(deferred_ops.addmm, x, (bias, weight), (bias, x, weight))
    if node.target in (aten.mm.default, aten.matmul.default):
        x, weight = (node.args[place] for place in (0, 1))
        if _dimensions(x) >= 2 == _dimensions(weight):
            return _checked(deferred_ops.matmul, x, (weight,), (x, weight))
    if node.target is aten.embedding.default and not given["sparse"]:
        weight, x = given["weight"], given["indices"]
        return _checked(
            deferred_ops.embedding, x, (weight,), (weight, x, given["padding_idx"], given["scale_grad_by_freq"])
        )
    if node.target in _CONVOLUTIONS:
        x, *read = (given[name] for name in ("input", "weight", "bias"))
        spatial = _dimensions(read[0]) - 2
        if _dimensions(x) != spatial + 2:
            return None  # a single sample, without a batch dimension
        turned = given.get("transposed", "conv_transpose" in str(node.target))
        stride, padding, dilation, more = (
            _spread(given.get(name, 0), spatial) for name in ("stride", "padding", "dilation", "output_padding")
        )
        values = (x, *read, stride, padding, dilation, turned, more, given["groups"])
        return _checked(deferred_ops.convolution, x, read, values)
    return None


def _checked(function: Callable[..., Any], x: Any, read: Sequence[Any], values: tuple[Any, ...]) -> _Call | None:
    parameters = tuple(each for each in read if each is not None)
    real = all(isinstance(each, Node) and each.meta["val"].is_floating_point() for each in parameters)
    return _Call(function, x, parameters, values) if real else None


def _dimensions(node: Any) -> int:
    """Number of dimensions of a node's tensor; 0 for what is none."""
    return len(getattr(node.meta.get("val"), "shape", ())) if isinstance(node, Node) else 0


def _spread(given: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions; a single one stands for all of them."""
    listed = (given,) if isinstance(given, int) else tuple(given)
    return listed * count if len(listed) == 1 else listed


def _groups(read: Sequence[Sequence[Node]]) -> list[int]:
    """Number of the group of each operator, given the parameters that it reads: those that share one are together."""
    found = list(range(len(read)))
    group_of: dict[Node, int] = {}
    for number, parameters in enumerate(read):
        for each in parameters:
            other = group_of.setdefault(each, found[number])
            found = [found[number] if group == other else group for group in found]
            group_of = {node: found[number] if group == other else group for node, group in group_of.items()}
    return found


def _rewritten(part: Part, calls: Mapping[Node, _Call], groups: Mapping[Node, int]) -> GraphModule:
    """The part with `calls` in place of their operators, and a queue behind its arguments."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    queue: Node | None = None
    for node in part.module.graph.nodes:
        if node.op != "placeholder" and queue is None:
            queue = graph.placeholder("weight_queue")
        call = calls.get(node)
        if call is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        values = (copies[each] if isinstance(each, Node) else each for each in call.values)
        copies[node] = graph.create_node("call_function", call.function, (queue, groups[node], *values), name=node.name)
        copies[node].meta = node.meta
    return direct_module(part.module, graph, f"{type(part.module).__name__}InHalves")
