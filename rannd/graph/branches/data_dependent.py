"""Python branches on tensors (`if mask.any():`) that are known from the call's tensors and constants.

While the model is traced, `Deciding` answers them with what the mini-batch at hand says (shadows.py). The graph is then
for calls that decide in the same way: what was decided is handed out of the traced code beside the outputs, and
`Decisions` computes it from the arguments of a later call. A call that decides otherwise is another graph.

A decision is made for the whole mini-batch of a rank, as the model itself would make it, and its pieces all run the
branch that was taken: their rows are computed as they would be in the whole mini-batch.

So are branches on sizes that depend on what is in a tensor (`if mask.nonzero().shape[0] > 0:`). Branches on random
numbers are in draws.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any, Self

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from rannd.graph.branches.concrete_values import Shadows, hidden
from rannd.graph.branches.random_branches import Draws
from rannd.graph.fx.aliasing import Aliases, is_random, written
from rannd.graph.fx.fx_names import graph_module
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.traced import Decisions, attribute, operator_name
from rannd.graph.modules.source_location import Offence, here, of_torch
from rannd.patches import caller, declare, patched

_SIZES = declare("branches on sizes", torch.SymBool, "__bool__", "those that depend on what is in a tensor are decided")

_TRUTHS = ("__bool__", "is_nonzero")
_NUMBERS = ("item", "__int__", "__index__")
"""Decided for tensors of bools only: a number that the code computes with is no branch."""


class Undecidable(Exception):
    """A decision cannot be computed from the arguments alone."""

    def __init__(self, module: str) -> None:
        super().__init__("what it decides by cannot be told from the rest of what it computes")
        self.module = module
        """Dotted path of the module that decides."""


class Deciding(TorchFunctionMode):
    """Answers branches on tensors that have shadows, while a model is traced."""

    def __init__(
        self, shadows: Shadows, assumed: Sequence[bool] | None = None, chance: Callable[[int], bool] = lambda _: False
    ) -> None:
        """`assumed`: what to decide, in this order, in place of what the shadows say; `chance`: the outcome of each
        random branch.
        """
        super().__init__()
        self._shadows = shadows
        self._draws = Draws()
        self._assumed = assumed
        self._chance = chance
        self.noted: list[tuple[torch.Tensor | torch.SymBool, bool]] = []
        """What was decided by the call's tensors, and how."""
        self.chances: list[torch.Tensor] = []
        """What was decided by random numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _TRUTHS or name in _NUMBERS:
            value = self._branch(name, args[0]) if len(args) == 1 and not kwargs else None
            if value is not None:
                return int(value) if name in ("__int__", "__index__") else value
        result = self._shadows.follow(func, args, kwargs)
        self._draws.follow(func, args, result)
        return result

    def _branch(self, name: str, tensor: torch.Tensor) -> bool | None:
        """The way to go, None where nobody knows it."""
        chance = self._draws.chance(tensor)
        if chance is not None:
            if chance.certain is None and chance.outcome is None:
                chance.outcome = self._chance(len(self.chances))
                self.chances.append(tensor.clone())
            return chance.outcome if chance.certain is None else chance.certain
        shadow = self._shadows.find(tensor)
        truth = _truth(name, shadow.tensor) if shadow is not None else None
        if shadow is None or truth is None:
            return None
        return self._decide(tensor, truth) if shadow.given else truth

    def _decide(self, traced: torch.Tensor, value: bool) -> bool:
        value = self._way(value)
        self.noted.append((traced.clone(), value))  # as it is now; the code may write into it later
        return value

    def _way(self, value: bool) -> bool:
        if self._assumed is not None and len(self.noted) < len(self._assumed):
            return self._assumed[len(self.noted)]
        return value

    def _size(self, truth: Callable[[torch.SymBool], bool], condition: torch.SymBool) -> bool:
        """The truth of a comparison of sizes."""
        try:
            return truth(condition)
        except GuardOnDataDependentSymNode:
            if of_torch(caller().f_code.co_filename):
                raise  # torch itself asks, and may go on without an answer
            known = self._shadows.number(condition)
            if known is None:  # not an Exception: the user's code must not catch it and go on
                raise Offence(
                    "branches on what is in its tensors", here(self._shadows.model), "which a graph cannot"
                ) from None
            value = self._way(known)
            self.noted.append((condition, value))
            torch._check(condition if value else torch.sym_not(condition))
            return value

    def __enter__(self) -> Self:
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(patched(_SIZES.around(self._size)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        self._patches.close()
        super().__exit__(*problem)  # type: ignore[no-untyped-call]


def _truth(name: str, shadow: torch.Tensor) -> bool | None:
    """What a branch on a tensor with these contents sees, None where it is none."""
    with hidden():
        if shadow.numel() != 1 or not (name in _TRUTHS or shadow.dtype == torch.bool):
            return None
        return bool(shadow)


def split_off(root: GraphModule, handed: Sequence[Node], values: Sequence[bool], state: Set[int]) -> Decisions:
    """Take what was decided out of a graph: a module that computes it, and nothing left of it in the graph.

    `handed` are the nodes that were outputs beside the model's own, and are none any more; `state` has the ids of
    the model's parameters and buffers.
    """
    needed = _needed(root, handed, state)
    graph = Graph()
    copies: dict[Node, Node] = {}
    sharing = Aliases(root)
    touched = {sharing.find(target) for node in needed for target in written(root, node)}
    for node in root.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
    for node in root.graph.nodes:
        if node.op == "placeholder" and node in needed and sharing.find(node) in touched:
            copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
        elif node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in handed))
    decisions = Decisions(graph_module(root, graph, "Decisions"), tuple(values))
    erase(root, handed)
    return decisions


def _needed(root: GraphModule, handed: Sequence[Node], state: Set[int]) -> set[Node]:
    """All that the nodes are made of, with the writes into it."""
    order = {node: number for number, node in enumerate(root.graph.nodes)}
    own = _of_the_model(root, state)
    sharing = Aliases(root)
    writers = [
        (node, {sharing.find(target) for target in written(root, node)})
        for node in root.graph.nodes
        if node.op == "call_function" and node not in own  # what reads the model's state has not reached a decision
    ]
    writers = [(node, homes) for node, homes in writers if homes]
    needed: set[Node] = set()
    for decided in handed:
        stack = [decided]
        mine: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in mine:
                continue
            if node in own:
                raise Undecidable(decided.meta.get("module", ""))
            mine.add(node)
            stack += node.all_input_nodes
            home = sharing.find(node)
            stack += [writer for writer, homes in writers if home in homes and order[writer] < order[decided]]
        needed |= mine
    return needed


def _of_the_model(root: GraphModule, state: Set[int]) -> set[Node]:
    """Nodes that depend on the model's parameters and buffers, or on random numbers."""
    found: set[Node] = set()
    for node in root.graph.nodes:
        if node.op == "get_attr":
            value = attribute(root, str(node.target))
            depends = isinstance(value, nn.Parameter) or id(value) in state
        else:
            depends = node.op == "call_function" and (
                operator_name(node.target) == LEAF
                or is_random(root, node)
                or any(source in found for source in node.all_input_nodes)
            )
        if depends:
            found.add(node)
    return found


def erase(root: GraphModule, nodes: Sequence[Node]) -> None:
    """Erase pure nodes that nobody reads, and what only they read."""
    stack = list(nodes)
    erased: set[Node] = set()
    while stack:
        node = stack.pop()
        if node.op != "call_function" or node.users or node in erased or written(root, node) or is_random(root, node):
            continue
        stack += node.all_input_nodes
        erased.add(node)
        root.graph.erase_node(node)
