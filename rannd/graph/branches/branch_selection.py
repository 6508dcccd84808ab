"""Both ways of a random branch in one graph: a layer that is dropped at random is computed, and a `where` chooses.

The model is traced with every branch taken one way (the *base*), and then once for each branch with this one taken the
other way. Where such a trace is the base without a block of operators, with the values that the block makes replaced
by others (the input of the layer that is skipped), the base gets ``where(outcome, replacement, value)`` behind each
of these values. A last trace with all branches the other way has to be the base with all blocks and values replaced.

    base    h0 -> [layer 1] -> h1 -> [layer 2] -> h2 -> head
    1       h0 ---------------------> [layer 2] -> h2 -> head         h1 is replaced by h0
    2       h0 -> [layer 1] -> h1 -----------------------> head         h2 is replaced by h1
    all     h0 -------------------------------------------> head

Outputs and gradients have the distribution that the model's have. A dropped layer costs what it costs, and its
parameters get gradients of zero, in place of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.aliasing import Aliases, written
from rannd.graph.fx.sizes import is_number, is_plain_tensor
from rannd.graph.fx.symbolic_values import Number
from rannd.graph.fx.traced import attribute

MOST_CHANCES = 64
"""With more random branches than this there would be too many traces."""


class NotASelection(Exception):
    """A random branch does more than choose between values."""

    def __init__(self, why: str, module: str) -> None:
        super().__init__(f"a random branch {why}")
        self.module = module
        """Dotted path of the module that branches."""


class MoreOperators(NotASelection):
    """The base has no operators that could be left out: the other outcome is the base to take."""


@dataclass(frozen=True)
class BranchTrace:
    """One trace of the model: its graph, and the outcomes of its random branches as nodes."""

    root: GraphModule
    spec: pytree.TreeSpec
    """Of the output."""
    chances: Sequence[Node]


@dataclass(frozen=True)
class _Skipped:
    """What one branch, taken the other way, leaves out of the base."""

    block: frozenset[Node]
    pairs: Mapping[Node, Node]
    """Values of the block that are read behind it, and what is read instead."""


def select(base: BranchTrace, outcome: bool, others: Sequence[BranchTrace], last: BranchTrace) -> None:
    """Put both ways of all random branches into the graph of `base`, in which all have this outcome.

    `others` has a trace for each branch in which this one goes the other way, `last` one in which all do. Raises
    NotASelection, and leaves the base as it was.
    """
    count = len(base.chances)
    skipped = []
    for number, other in enumerate((*others, last)):
        module = base.chances[min(number, count - 1)].meta.get("module", "")
        if len(other.chances) != count or other.spec != base.spec:
            raise NotASelection("decides about other branches, or what is returned", module)
    for chance, other in zip(base.chances, others, strict=True):
        skipped.append(_difference(base.root, other.root, chance.meta.get("module", "")))
    pairs: dict[Node, Node] = {}
    for chance, each in zip(base.chances, skipped, strict=True):
        if pairs.keys() & each.pairs.keys():
            raise NotASelection("replaces a value that another one replaces", chance.meta.get("module", ""))
        pairs.update(each.pairs)
        _check_writes(base.root, each, chance.meta.get("module", ""))
    _check_all(base, skipped, pairs, last)
    order = {node: number for number, node in enumerate(base.root.graph.nodes)}
    found = [
        (value, instead, chance, each.block)
        for chance, each in zip(base.chances, skipped, strict=True)
        for value, instead in each.pairs.items()
    ]
    chosen: dict[Node, Node] = {}
    for value, instead, chance, block in sorted(found, key=lambda pair: order[pair[0]]):
        instead = chosen.get(instead, instead)
        chosen[value] = _insert(base.root.graph, chance, outcome, value, instead, block)


def _insert(graph: Graph, chance: Node, outcome: bool, value: Node, instead: Node, block: frozenset[Node]) -> Node:
    readers = [user for user in value.users if user not in block and not is_number(user.meta.get("val"))]
    with graph.inserting_after(value):
        ways = (value, instead) if outcome else (instead, value)
        chosen = graph.call_function(torch.ops.aten.where.self, (chance, *ways))
    chosen.meta = {"val": value.meta["val"], "module": chance.meta.get("module", "")}
    for reader in readers:
        reader.replace_input_with(value, chosen)
    return chosen


def _difference(base: GraphModule, other: GraphModule, module: str) -> _Skipped:
    """What is left out of the base in another trace."""
    mine, others = _steps(base), _steps(other)
    removed = len(mine) - len(others)
    if removed < 0:
        raise MoreOperators("adds operators", module)
    match = _Match(base, other)
    start = 0
    while start < len(others) and match.same(mine[start], others[start]):
        start += 1
    block = frozenset(mine[start : start + removed])
    match.allow(block)
    for node, twin in zip(mine[start + removed :], others[start:], strict=True):
        if not match.same(node, twin):
            raise NotASelection(f"changes what happens later ({node.target})", module)
    for value, instead in match.pairs.items():
        if not is_plain_tensor(value) or value.meta["val"] != instead.meta.get("val"):
            raise NotASelection("chooses between values of different types or shapes", module)
    return _Skipped(block, dict(match.pairs))


def _check_all(base: BranchTrace, skipped: Sequence[_Skipped], pairs: Mapping[Node, Node], last: BranchTrace) -> None:
    """The trace with all branches the other way is the base with everything replaced."""
    module = base.chances[-1].meta.get("module", "")
    blocks = frozenset[Node]().union(*(each.block for each in skipped))
    mine = [node for node in _steps(base.root) if node not in blocks]
    others = _steps(last.root)
    match = _Match(base.root, last.root)
    match.replace(pairs)
    if len(mine) != len(others) or not all(match.same(node, twin) for node, twin in zip(mine, others, strict=True)):
        raise NotASelection("depends on other random branches", module)


def _check_writes(root: GraphModule, skipped: _Skipped, module: str) -> None:
    """Nothing that is left out, or chosen from, is written into where both ways would see it."""
    sharing = Aliases(root)
    members: dict[Node, list[Node]] = {}
    for node in root.graph.nodes:
        members.setdefault(sharing.find(node), []).append(node)
    chosen = {sharing.find(node) for pair in skipped.pairs.items() for node in pair}
    behind = False
    for node in root.graph.nodes:
        homes = {sharing.find(target) for target in written(root, node)}
        if node in skipped.block:
            behind = True
            if any(member not in skipped.block for home in homes for member in members[home]):
                raise NotASelection("leaves out a write into memory that others read", module)
        elif behind and homes & chosen:
            raise NotASelection("chooses between values that are written into later", module)


def _steps(root: GraphModule) -> list[Node]:
    """The nodes whose order counts: operators on tensors, and the output."""
    return [
        node
        for node in root.graph.nodes
        if node.op == "output" or (node.op == "call_function" and not isinstance(node.meta.get("val"), Number))
    ]


class _Match:
    """Compares the nodes of two graphs, in their order."""

    def __init__(self, mine: GraphModule, other: GraphModule) -> None:
        self._mine = mine
        self._other = other
        self._twin: dict[Node, Node] = {}
        """Node of the other graph: node of mine."""
        self._block: frozenset[Node] = frozenset()
        self._replaced: Mapping[Node, Node] = {}
        self.pairs: dict[Node, Node] = {}
        for node, twin in zip(_placeholders(mine.graph), _placeholders(other.graph), strict=True):
            self._twin[twin] = node

    def allow(self, block: frozenset[Node]) -> None:
        """From now on, values of the block may be replaced; `pairs` is filled with what they are replaced by."""
        self._block = block

    def replace(self, pairs: Mapping[Node, Node]) -> None:
        """Values of mine are replaced like this."""
        self._replaced = pairs

    def same(self, node: Node, twin: Node) -> bool:
        """Whether two nodes do the same; they are twins then."""
        if node.op != twin.op or node.target != twin.target:
            return False
        if not (self._equal(node.args, twin.args) and self._equal(node.kwargs, twin.kwargs)):
            return False
        self._twin[twin] = node
        return True

    def _equal(self, value: Any, other: Any) -> bool:
        if isinstance(value, Node) and isinstance(other, Node):
            return self._equal_nodes(value, other)
        if type(value) is not type(other):
            return False
        if isinstance(value, (list, tuple)):
            return len(value) == len(other) and all(map(self._equal, value, other))
        if isinstance(value, dict):
            return value.keys() == other.keys() and all(self._equal(value[key], other[key]) for key in value)
        if isinstance(value, slice):
            return all(self._equal(getattr(value, each), getattr(other, each)) for each in ("start", "stop", "step"))
        return bool(value == other) or (value != value and other != other)

    def _equal_nodes(self, node: Node, other: Node) -> bool:
        while node in self._replaced:
            node = self._replaced[node]
        known = self._twin.get(other)
        if known is not None:
            if known is not node and node in self._block:
                return self.pairs.setdefault(node, known) is known
            return known is node
        if node.op != other.op:
            return False
        if node.op == "get_attr":
            return self._equal_attributes(
                attribute(self._mine, str(node.target)), attribute(self._other, str(other.target))
            )
        value = node.meta.get("val")
        if is_number(value):  # a function of the rows
            return bool(value == other.meta.get("val"))
        return isinstance(value, Number) and self.same(node, other)

    @staticmethod
    def _equal_attributes(value: Any, other: Any) -> bool:
        if value is other:
            return True
        if isinstance(value, GraphModule) and isinstance(other, GraphModule):
            nodes, twins = list(value.graph.nodes), list(other.graph.nodes)
            if len(nodes) != len(twins) or len(_placeholders(value.graph)) != len(_placeholders(other.graph)):
                return False
            match = _Match(value, other)
            return all(match.same(node, twin) for node, twin in zip(_steps(value), _steps(other), strict=True))
        return (
            type(value) is torch.Tensor
            and type(other) is torch.Tensor
            and value.dtype == other.dtype
            and value.shape == other.shape
            and value.device == other.device
            and not value.is_meta
            and torch.equal(value, other)
        )


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
