"""Data-dependent branches (`if mask.any():`) whose condition follows from the call's tensors and constants.

During tracing, `Deciding` evaluates the condition with the current mini-batch (`concrete_values.py`). The graph is
valid for calls with the same outcomes: the traced code returns the conditions as additional outputs, and `Decisions`
computes them from the arguments of a later call. A call with other outcomes gets another graph.

A condition is evaluated on the whole mini-batch of a rank, as the model itself would do. All of its microbatches run
the same side, so their rows are computed as they would be in the whole mini-batch.

Branches on data-dependent sizes (`if mask.nonzero().shape[0] > 0:`) are treated in the same way. For branches on random
numbers see `random_branches.py`.
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

_SIZES = declare("branches on sizes", torch.SymBool, "__bool__", "data-dependent ones follow the call's tensors")

_TRUTHS = ("__bool__", "is_nonzero")
_NUMBERS = ("item", "__int__", "__index__")
"""Evaluated for bool tensors only: other numbers are used in computations, not as conditions."""


class Undecidable(Exception):
    """A branch condition cannot be computed from the arguments alone."""

    def __init__(self, module: str) -> None:
        super().__init__("the condition of a branch cannot be separated from the rest of the computation")
        self.module = module
        """Dotted path of the module that branches."""


class Deciding(TorchFunctionMode):
    """Evaluates branch conditions on tensors that have shadows, during tracing."""

    def __init__(
        self, shadows: Shadows, assumed: Sequence[bool] | None = None, chance: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Answer branches from `shadows`, or from `assumed`: outcomes to use first, in order.

        `chance` maps the number of a random branch to its outcome.
        """
        super().__init__()
        self._shadows = shadows
        self._draws = Draws()
        self._assumed = assumed
        self._chance = chance
        self.noted: list[tuple[torch.Tensor | torch.SymBool, bool]] = []
        """Conditions that depend on the call's tensors, with their outcomes."""
        self.chances: list[torch.Tensor] = []
        """Conditions that depend on random numbers."""

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
        """The outcome of a branch, None if it is unknown."""
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
        self.noted.append((traced.clone(), value))  # a copy, since the code may write into it later
        return value

    def _way(self, value: bool) -> bool:
        if self._assumed is not None and len(self.noted) < len(self._assumed):
            return self._assumed[len(self.noted)]
        return value

    def _size(self, truth: Callable[[torch.SymBool], bool], condition: torch.SymBool) -> bool:
        """Evaluate a condition on sizes in place of `SymBool.__bool__`."""
        try:
            return truth(condition)
        except GuardOnDataDependentSymNode:
            if of_torch(caller().f_code.co_filename):
                raise  # torch's own code may catch this and continue without the outcome
            known = self._shadows.number(condition)
            if known is None:  # an Offence is no Exception, so that user code does not catch it and continue
                raise Offence(
                    "branches on the values of its tensors", here(self._shadows.model), "which a graph cannot do"
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
    """The outcome of a branch on a tensor with these contents, None if it is not used as a condition."""
    with hidden():
        if shadow.numel() != 1 or not (name in _TRUTHS or shadow.dtype == torch.bool):
            return None
        return bool(shadow)


def split_off(root: GraphModule, handed: Sequence[Node], values: Sequence[bool], state: Set[int]) -> Decisions:
    """Move branch conditions from a graph to a module that computes them from the arguments.

    `handed` are the conditions, which have been removed from the outputs of the graph; `values` are their outcomes;
    `state` has the ids of the model's parameters and buffers. Undecidable if a condition depends on anything else.
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
    modules = tuple(node.meta.get("module", "") for node in handed)
    decisions = Decisions(graph_module(root, graph, "Decisions"), tuple(values), modules)
    erase(root, handed)
    return decisions


def _needed(root: GraphModule, handed: Sequence[Node], state: Set[int]) -> set[Node]:
    """All nodes needed to compute the conditions, including in-place writes. Undecidable."""
    order = {node: number for number, node in enumerate(root.graph.nodes)}
    own = _of_the_model(root, state)
    sharing = Aliases(root)
    writers = [
        (node, {sharing.find(target) for target in written(root, node)})
        for node in root.graph.nodes
        if node.op == "call_function" and node not in own  # conditions do not depend on nodes that read model state
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
    """Nodes that depend on the model's parameters and buffers, on random numbers, or on leaves."""
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
    """Erase unused nodes without side effects, and inputs that only they use."""
    stack = list(nodes)
    erased: set[Node] = set()
    while stack:
        node = stack.pop()
        if node.op != "call_function" or node.users or node in erased or written(root, node) or is_random(root, node):
            continue
        stack += node.all_input_nodes
        erased.add(node)
        root.graph.erase_node(node)
