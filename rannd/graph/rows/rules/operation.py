"""Interface of propagation rules, and helpers shared by them.

A rule takes an :class:`Operation` and returns the state of its result, or raises Coupled. It is called only if at
least one argument depends on the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.fx import Node

from rannd.graph.fx.sizes import PROBE_ROWS
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.rows.rules.states import FIXED, Coupled, Rows, State


@dataclass(frozen=True)
class Operation:
    """A call of an operator: its arguments by name, their states and their shapes at PROBE_ROWS rows."""

    name: str
    node: Node
    args: dict[str, Any]
    state: Callable[[Any], State]
    shape: Callable[[Any], tuple[int, ...]]

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the result."""
        if not isinstance(self.node.meta["val"], TensorValue):
            raise Coupled(f"{self.name} does not return a single tensor")
        return self.shape(self.node)

    def rows(self, name: str) -> Rows | None:
        """State of a tensor argument as Rows, None if it is fixed; Coupled for anything else."""
        return self.as_rows(self.args.get(name))

    def as_rows(self, value: Any) -> Rows | None:
        """Like `rows`, for a value instead of an argument name."""
        state = self.state(value)
        if state is FIXED or value is None:
            return None
        if isinstance(state, Rows):
            return state
        raise Coupled(f"{self.name} takes {describe(state)}")

    def fixed(self, *names: str) -> None:
        """Raise Coupled if one of the arguments depends on the samples."""
        for name in names:
            for value in leaves(self.args.get(name)):
                if self.state(value) is not FIXED:
                    raise Coupled(f"argument {name} of {self.name} depends on the samples")


Rule = Callable[[Operation], State]


RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators (names without overload)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def describe(state: State) -> str:
    return state.value if hasattr(state, "value") else f"a {type(state).__name__}"


def leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def dims_of(value: Any, ndim: int) -> set[int]:
    dims = range(ndim) if value is None or value == [] else leaves(value)
    return {dim % ndim if ndim else 0 for dim in dims}


def relocate(outer: int, inner: int, shape: tuple[int, ...]) -> Rows:
    """Rows state after a reshape to `shape`, for samples with `outer` elements before and `inner` behind them."""
    holding = [dim for dim, size in enumerate(shape) if size and size % PROBE_ROWS == 0]
    if len(holding) != 1:
        raise Coupled("a reshape spreads the samples over several dimensions")
    (dim,) = holding
    before = prod(shape[:dim])
    if before == 0 or outer % before:
        raise Coupled("a reshape mixes samples")
    inside = outer // before
    rest, remainder = divmod(shape[dim], inside * PROBE_ROWS)
    if remainder or rest * prod(shape[dim + 1 :]) != inner:
        raise Coupled("a reshape mixes samples")
    return Rows(dim, inside, rest)


def aligned(op: Operation, values: list[Any]) -> Rows:
    """State of a broadcast of `values`, whose `dim` is negative; Coupled unless their batch dimensions line up."""
    found: set[tuple[int, int, int]] = set()
    for value in values:
        state = op.as_rows(value)
        if state is not None:
            found.add((len(op.shape(value)) - state.dim, state.outer, state.inner))
    if len(found) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((right, outer, inner),) = found
    for value in values:
        if isinstance(value, Node) and op.state(value) is FIXED:
            shape = op.shape(value)
            if len(shape) >= right and shape[-right] != 1:
                raise Coupled(f"{op.name} combines samples with a fixed tensor of the batch size")
    return Rows(-right, outer, inner)


def away(op: Operation, name: str, dims: set[int]) -> Rows:
    """State of argument `name`; Coupled if one of `dims`, along which the operator works, holds the samples."""
    rows = op.rows(name)
    if rows is None:
        raise Coupled(f"{op.name} has a fixed input, but other arguments that depend on the samples")
    if rows.dim in dims:
        raise Coupled(f"{op.name} works along the batch dimension")
    return rows


def filled(shape: tuple[int, ...]) -> Rows:
    """State of a tensor of `shape` with the same (or random) values for every sample."""
    holding = [dim for dim, size in enumerate(shape) if size and size % PROBE_ROWS == 0]
    if len(holding) != 1:
        raise Coupled("a shape depends on the batch size in an unsupported way")
    return Rows(holding[0], 1, shape[holding[0]] // PROBE_ROWS)


def everywhere(op: Operation, state: Rows) -> State:
    """The same state for every result of an operator."""
    value = op.node.meta["val"]
    return (state,) * len(value) if isinstance(value, (tuple, list)) else state


def together(op: Operation, *names: str) -> Rows:
    """The state shared by these tensor arguments; None arguments are ignored. Coupled if states differ."""
    states = {op.rows(name) for name in names if isinstance(op.args.get(name), Node)}
    if len(states) != 1 or None in states:
        raise Coupled(f"{op.name} combines different samples")
    (rows,) = states
    assert rows is not None
    return rows
