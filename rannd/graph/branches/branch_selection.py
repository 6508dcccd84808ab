"""Put both sides of random branches into one graph: a randomly dropped layer is computed, and a `where` selects.

The model is traced with the same outcome for every branch (the *base*), then once per branch with only that one
changed. If such a trace equals the base without a block of operators, with the results of the block replaced by other
values (the input of the skipped layer), ``where(outcome, replacement, value)`` is inserted into the base after each of
these results. A last trace with all outcomes changed has to equal the base with all blocks and values replaced.

    base    h0 -> [layer 1] -> h1 -> [layer 2] -> h2 -> head
    1       h0 ---------------------> [layer 2] -> h2 -> head         h1 is replaced by h0
    2       h0 -> [layer 1] -> h1 -----------------------> head         h2 is replaced by h1
    all     h0 -------------------------------------------> head

Outputs and gradients have the same distribution as the model's. A dropped layer costs as much as one that is not, and
its parameters get zero gradients instead of None.
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
"""Maximum number of random branches, each of which needs a trace."""


class NotASelection(Exception):
    """A random branch does more than select between values."""

    def __init__(self, why: str, module: str) -> None:
        super().__init__(f"a random branch {why}")
        self.module = module
        """Dotted path of the module that branches."""


class MoreOperators(NotASelection):
    """The other outcome runs more operators than the base, and has to be used as the base."""


@dataclass(frozen=True)
class BranchTrace:
    """One trace of the model: its graph, and the nodes that compute the outcomes of its random branches."""

    root: GraphModule
    spec: pytree.TreeSpec
    """Structure of the output."""
    chances: Sequence[Node]


@dataclass(frozen=True)
class _Skipped:
    """The part of the base that is skipped with the other outcome of one branch."""

    block: frozenset[Node]
    pairs: Mapping[Node, Node]
    """Maps results of the block that are read after it to the values read instead."""


def select(base: BranchTrace, outcome: bool, others: Sequence[BranchTrace], last: BranchTrace) -> None:
    """Insert both sides of all random branches into the graph of `base`, in which all have the given outcome.

    `others` has one trace per branch, with the other outcome for that branch; `last` has the other outcome for all.
    Raises NotASelection, and then leaves the base unchanged.
    """
    count = len(base.chances)
    skipped = []
    for number, other in enumerate((*others, last)):
        module = base.chances[min(number, count - 1)].meta.get("module", "")
        if len(other.chances) != count or other.spec != base.spec:
            raise NotASelection("changes the number of random branches, or the structure of the output", module)
    for chance, other in zip(base.chances, others, strict=True):
        skipped.append(_difference(base.root, other.root, chance.meta.get("module", "")))
    pairs: dict[Node, Node] = {}
    for chance, each in zip(base.chances, skipped, strict=True):
        if pairs.keys() & each.pairs.keys():
            raise NotASelection("replaces a value that another random branch replaces", chance.meta.get("module", ""))
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
    """Find the block of the base that another trace skips."""
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
            raise NotASelection(f"changes operators after the code that it skips ({node.target})", module)
    for value, instead in match.pairs.items():
        if not is_plain_tensor(value) or value.meta["val"] != instead.meta.get("val"):
            raise NotASelection("selects between values of different dtypes or shapes", module)
    return _Skipped(block, dict(match.pairs))


def _check_all(base: BranchTrace, skipped: Sequence[_Skipped], pairs: Mapping[Node, Node], last: BranchTrace) -> None:
    """Raise NotASelection unless the trace with all outcomes changed equals the base with all values replaced."""
    module = base.chances[-1].meta.get("module", "")
    blocks = frozenset[Node]().union(*(each.block for each in skipped))
    mine = [node for node in _steps(base.root) if node not in blocks]
    others = _steps(last.root)
    match = _Match(base.root, last.root)
    match.replace(pairs)
    if len(mine) != len(others) or not all(match.same(node, twin) for node, twin in zip(mine, others, strict=True)):
        raise NotASelection("depends on other random branches", module)


def _check_writes(root: GraphModule, skipped: _Skipped, module: str) -> None:
    """Raise NotASelection if an in-place write would be visible on both sides of a branch."""
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
                raise NotASelection("skips an in-place write into memory that other operators read", module)
        elif behind and homes & chosen:
            raise NotASelection("selects between values that are written in place later", module)


def _steps(root: GraphModule) -> list[Node]:
    """Nodes whose order matters: operators on tensors, and the output."""
    return [
        node
        for node in root.graph.nodes
        if node.op == "output" or (node.op == "call_function" and not isinstance(node.meta.get("val"), Number))
    ]


class _Match:
    """Matches the nodes of two graphs in order."""

    def __init__(self, mine: GraphModule, other: GraphModule) -> None:
        self._mine = mine
        self._other = other
        self._twin: dict[Node, Node] = {}
        """Maps nodes of the other graph to those of `mine`."""
        self._block: frozenset[Node] = frozenset()
        self._replaced: Mapping[Node, Node] = {}
        self.pairs: dict[Node, Node] = {}
        for node, twin in zip(_placeholders(mine.graph), _placeholders(other.graph), strict=True):
            self._twin[twin] = node

    def allow(self, block: frozenset[Node]) -> None:
        """Allow replacing results of the block from now on, and record the replacements in `pairs`."""
        self._block = block

    def replace(self, pairs: Mapping[Node, Node]) -> None:
        """Expect these values of `mine` to be replaced."""
        self._replaced = pairs

    def same(self, node: Node, twin: Node) -> bool:
        """Whether two nodes are the same operator on matching arguments; if so, they are matched."""
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
        if is_number(value):  # a function of the number of rows
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
