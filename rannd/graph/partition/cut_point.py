"""CutPoint: the user's marks between layers, as the only places where a stage may end (Varuna's idea).

    x = self.first(x)
    x = self.cut(x)      self.cut = pyrannc.CutPoint(): the identity
    x = self.second(x)   may be the first of a stage

While a model is exported the module makes an alias of each tensor, whose module tells what it is; the operators that
run between two marks are a segment. The alias is taken out of the graph again. Where the code behind it writes into
the tensor in place, it is a copy, if nobody can tell the difference, so that the two sides share no memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.aliasing import Aliases, written
from rannd.graph.fx.sizes import is_number
from rannd.graph.fx.traced import Traced, attribute


class CutPoint(nn.Module):
    """The identity, between two parts of a model that may become stages of their own.

    ``x = cut(x)`` or ``x, mask = cut(x, mask)``: everything that the model runs before the call may end a stage, and
    what it runs afterwards may begin one. Where a model has such modules, stages begin right after them only. One
    module may be called many times (between the layers of a loop); each call is a place. Without RaNNCModule it does
    nothing.
    """

    def forward(self, value: Any, *more: Any) -> Any:
        """`value`, or a tuple of all that is given."""
        if torch.compiler.is_exporting():
            value, more = pytree.tree_map_only(torch.Tensor, _mark, (value, more))
        return (value, *more) if more else value


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return found


@dataclass(frozen=True)
class Segments:
    """Where a graph may be cut: the segment of each of its nodes, from 1 on; 0 everywhere without CutPoints."""

    of: Mapping[Node, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """What to tell the user of CutPoints that have no effect."""

    def number(self, graph: Graph) -> dict[Node, int]:
        """The segment of every node, also of those that were added since: that of the node before."""
        found: dict[Node, int] = {}
        last = 0
        for node in graph.nodes:
            last = max(last, self.of.get(node, 0))
            found[node] = last
        return found

    def hash(self, digest: str, graph: Graph) -> str:
        """The hash of a graph, with the places where it may be cut."""
        if not self.of:
            return digest
        numbers = [str(number) for number in self.number(graph).values()]
        return hashlib.sha256(f"{digest}|{' '.join(numbers)}".encode()).hexdigest()


def segments(traced: Traced, model: nn.Module) -> Segments:
    """Find the calls of CutPoints in a traced model, and take their operators out of its graph."""
    names = {name: module for name, module in model.named_modules() if isinstance(module, CutPoint)}
    if not names:
        return Segments()
    marks = [node for node in traced.graph.nodes if _is_mark(node, model)]
    of: dict[Node, int] = {}
    number, behind = 1, False
    for node in traced.graph.nodes:
        if node.op == "call_function" and not is_number(node.meta.get("val")):
            marked = node in marks
            number += behind and not marked  # several tensors of one call are one place
            behind = marked
        of[node] = number
    idle = tuple(_idle(traced, names, marks))
    for mark in marks:
        if _settle(traced, mark):
            del of[mark]
        elif mark.target is torch.ops.aten.clone.default:
            of[mark] += 1  # with those who write into it
    return Segments(of if marks else {}, idle)


def _is_mark(node: Node, model: nn.Module) -> bool:
    if node.target is not torch.ops.aten.alias.default:
        return False
    try:
        return isinstance(model.get_submodule(node.meta.get("module", "")), CutPoint)
    except AttributeError:
        return False


def _idle(traced: Traced, names: Mapping[str, nn.Module], marks: Iterable[Node]) -> list[str]:
    """Which CutPoints no mark shows, and why."""
    seen = {id(names[mark.meta["module"]]) for mark in marks if mark.meta["module"] in names}
    inside = _inside(traced.root, traced.graph.nodes)
    told = []
    for name, module in names.items():
        leaf = next((path for path in traced.leaf_paths if not path or f"{name}.".startswith(f"{path}.")), None)
        if id(module) in seen:
            continue
        if leaf is not None:
            where = f"module {leaf}" if leaf else "the whole model"
            told.append(f"CutPoint {name} has no effect: {where} runs as one operator")
        elif name in inside:
            told.append(f"CutPoint {name} has no effect: it is called under no_grad or autocast, which cannot be cut")
        else:
            told.append(f"CutPoint {name} has no effect: it is not called")
    return told


def _inside(root: nn.Module, nodes: Iterable[Node]) -> set[str]:
    """Modules of the operators in regions of their own."""
    found: set[str] = set()
    for node in nodes:
        if node.op == "get_attr" and isinstance(inner := attribute(root, str(node.target)), GraphModule):
            found |= {each.meta.get("module", "") for each in inner.graph.nodes}
            found |= _inside(inner, inner.graph.nodes)
    return found


def _settle(traced: Traced, mark: Node) -> bool:
    """Take a mark out of the graph, or make a copy of it where that is right; whether it is out."""
    (source,) = mark.all_input_nodes
    order = {node: place for place, node in enumerate(traced.graph.nodes)}
    sharing = Aliases(traced)
    home = sharing.find(mark)
    writers = [
        node
        for node in traced.graph.nodes
        if order[node] > order[mark] and any(sharing.find(target) is home for target in written(traced, node))
    ]
    if writers:
        if _separable(order, sharing, mark):
            mark.target = torch.ops.aten.clone.default
        return False
    if mark in traced.results:
        return False
    mark.replace_all_uses_with(source)
    traced.graph.erase_node(mark)
    return True


def _separable(order: Mapping[Node, int], sharing: Aliases, mark: Node) -> bool:
    """Whether nobody reads later, in another way than through the mark, what is written into behind it."""
    home = sharing.find(mark)
    behind = {mark}
    for node in order:  # in order
        if sharing.find(node) is home and any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    before = [node for node in order if sharing.find(node) is home and node not in behind]
    return all(
        node.op == "call_function" and all(user is mark or order[user] < order[mark] for user in node.users)
        for node in before
    )
