"""CutPoint: an identity module with which users mark the only places where a stage may end (as in Varuna).

    x = self.first(x)
    x = self.cut(x)      self.cut = pyrannc.CutPoint(): the identity
    x = self.second(x)   may start a stage

During export the module inserts an ``aten.alias`` of each tensor, recognized by its module path; the operators between
two marks form a segment. The alias is removed from the graph again. If the code after it writes into the tensor in
place, it becomes a clone, provided that this is not observable, so that the two sides do not share memory.
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
    """Identity module that marks where a pipeline stage may end and the next one begin.

    Use ``x = cut(x)`` or ``x, mask = cut(x, mask)``. If a model contains CutPoints, stages begin only right after
    them. One module may be called many times (e.g. between the layers of a loop); each call is a possible boundary.
    Without RaNNCModule it has no effect.
    """

    def forward(self, value: Any, *more: Any) -> Any:
        """Return `value`, or a tuple of all arguments if there are several."""
        if torch.compiler.is_exporting():
            value, more = pytree.tree_map_only(torch.Tensor, _mark, (value, more))
        return (value, *more) if more else value


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return found


@dataclass(frozen=True)
class Segments:
    """Segment number of each node, starting at 1; stages may only begin where it changes. Empty without CutPoints."""

    of: Mapping[Node, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """Messages about CutPoints that have no effect."""

    def number(self, graph: Graph) -> dict[Node, int]:
        """Segment of every node; nodes added later get the segment of their predecessor."""
        found: dict[Node, int] = {}
        last = 0
        for node in graph.nodes:
            last = max(last, self.of.get(node, 0))
            found[node] = last
        return found

    def hash(self, digest: str, graph: Graph) -> str:
        """Extend a graph's hash by its segments."""
        if not self.of:
            return digest
        numbers = [str(number) for number in self.number(graph).values()]
        return hashlib.sha256(f"{digest}|{' '.join(numbers)}".encode()).hexdigest()


def segments(traced: Traced, model: nn.Module) -> Segments:
    """Find the calls of CutPoints in a traced model, and remove their alias operators from its graph."""
    names = {name: module for name, module in model.named_modules() if isinstance(module, CutPoint)}
    if not names:
        return Segments()
    marks = [node for node in traced.graph.nodes if _is_mark(node, model)]
    of: dict[Node, int] = {}
    number, behind = 1, False
    for node in traced.graph.nodes:
        if node.op == "call_function" and not is_number(node.meta.get("val")):
            marked = node in marks
            number += behind and not marked  # several tensors of one call are one boundary
            behind = marked
        of[node] = number
    idle = tuple(_idle(traced, names, marks))
    for mark in marks:
        if _settle(traced, mark):
            del of[mark]
        elif mark.target is torch.ops.aten.clone.default:
            of[mark] += 1  # in the segment of its in-place writers
    return Segments(of if marks else {}, idle)


def _is_mark(node: Node, model: nn.Module) -> bool:
    if node.target is not torch.ops.aten.alias.default:
        return False
    try:
        return isinstance(model.get_submodule(node.meta.get("module", "")), CutPoint)
    except AttributeError:
        return False


def _idle(traced: Traced, names: Mapping[str, nn.Module], marks: Iterable[Node]) -> list[str]:
    """Messages about CutPoints without a mark in the graph, and why."""
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
    """Paths of modules whose operators are inside no_grad or autocast subgraphs."""
    found: set[str] = set()
    for node in nodes:
        if node.op == "get_attr" and isinstance(inner := attribute(root, str(node.target)), GraphModule):
            found |= {each.meta.get("module", "") for each in inner.graph.nodes}
            found |= _inside(inner, inner.graph.nodes)
    return found


def _settle(traced: Traced, mark: Node) -> bool:
    """Remove a mark from the graph, or turn it into a clone if that is safe; return whether it was removed."""
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
    """Whether memory written after the mark is afterwards read only through the mark, so that a clone is safe."""
    home = sharing.find(mark)
    behind = {mark}
    for node in order:  # in graph order
        if sharing.find(node) is home and any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    before = [node for node in order if sharing.find(node) is home and node not in behind]
    return all(
        node.op == "call_function" and all(user is mark or order[user] < order[mark] for user in node.users)
        for node in before
    )
