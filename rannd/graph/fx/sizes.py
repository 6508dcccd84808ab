"""Evaluate symbolic shapes and numbers for a number of rows, and classify them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
from torch.fx import Node

from rannd.graph.fx.ir import Size
from rannd.graph.fx.symbolic_values import ROWS, Dim, Number, TensorValue, unified

PROBE_ROWS = 1_000_003
"""A prime that is no other dimension of a model: a dimension divisible by it holds the batch."""


@lru_cache(maxsize=100_000)
def _at(expr: Any, rows: int) -> Any:
    return expr.subs(ROWS, rows)


def number_at(value: Number | Dim | float, rows: int) -> Any:
    """Evaluate a size or number for `rows` rows."""
    if isinstance(value, Number):
        found = _at(value.expr, rows)
        return bool(found) if value.kind == "bool" else int(found) if value.kind == "int" else float(found)
    return int(_at(value, rows)) if isinstance(value, sympy.Expr) else value


def shape_at(value: TensorValue, rows: int) -> tuple[int, ...]:
    """Shape of a tensor for `rows` rows."""
    return tuple([size if type(size) is int else int(_at(size, rows)) for size in value.shape])


def _expression(value: object) -> Any:
    """The sympy expression of a size or number; None for plain numbers."""
    if isinstance(value, Number):
        return value.expr
    return value if isinstance(value, sympy.Basic) else None


@lru_cache(maxsize=100_000)
def _is_known(expr: Any) -> bool:
    return bool(expr.free_symbols <= {ROWS})


def depends_on_rows(value: Number | Dim | float) -> bool:
    """Whether a size or number is symbolic, i.e. not constant."""
    expr = _expression(value)
    return expr is not None and bool(expr.free_symbols)


@lru_cache(maxsize=100_000)
def _multiple(expr: Any) -> int | None:
    if not _is_known(expr):
        return None
    factor, rest = expr.as_coeff_Mul()
    if rest != ROWS:  # sympy's first division in a process costs 0.1 s of imports
        factor = sympy.expand(expr / ROWS)
    return int(factor) if factor.is_Integer and factor > 0 else None


def multiple_of_rows(value: Number | Dim | float) -> int | None:
    """k if a number is k x rows for every number of rows; 0 for constants, None for anything else."""
    return _multiple(_expression(value)) if depends_on_rows(value) else 0


def holds(expr: Any) -> Callable[[int], bool]:
    """Convert a condition recorded by tracing to a function of the rows; undecided conditions count as true."""
    condition = unified(expr)
    if not condition.free_symbols:
        return lambda rows: bool(condition != sympy.false)
    return lambda rows: bool(condition.subs(ROWS, rows) != sympy.false)


def is_number(value: object) -> bool:
    """Whether a value is a number that depends only on the number of rows."""
    return isinstance(value, Number) and _is_known(value.expr)


def is_known(value: TensorValue) -> bool:
    """Whether the shape of a tensor is determined by the number of rows."""
    return all(type(size) is int or _is_known(size) for size in value.shape)


def is_plain_tensor(node: Node) -> bool:
    """Whether a node's value is one tensor whose shape is determined by the number of rows."""
    value = node.meta.get("val")
    return isinstance(value, TensorValue) and is_known(value)


def polynomial(function: Any) -> Size:
    """Polynomial of degree 2 that interpolates `function` at 1, 2 and 3 rows."""
    one, two, three = (float(function(rows)) for rows in (1, 2, 3))
    c2 = (three - 2 * two + one) / 2
    c1 = two - one - 3 * c2
    return Size(one - c1 - c2, c1, c2)


@lru_cache(maxsize=100_000)
def tensor_bytes(value: TensorValue) -> Size:
    """Size of a tensor in bytes, as a function of the number of rows."""
    return polynomial(lambda rows: numel_at(value, rows) * value.element_size())


def numel_at(value: TensorValue, rows: int) -> int:
    """Number of elements of a tensor for `rows` rows."""
    count = 1
    for size in shape_at(value, rows):
        count *= size
    return count
