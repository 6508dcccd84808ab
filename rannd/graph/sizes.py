"""Shapes as functions of the number of rows.

Only first dimensions of batch tensors are symbolic when a model is traced, and all of them are the number of
rows of a piece. So every symbol stands for the rows, and any shape is a function of one number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import ToFloat

from rannd.graph.ir import Size

PROBE_ROWS = 1_000_003
"""A prime that no other dimension of a model has: a dimension that it divides holds the batch."""


@lru_cache(maxsize=100_000)
def _at(expr: Any, rows: int) -> int | float | bool:
    value = expr.subs(dict.fromkeys(expr.free_symbols, rows))
    if value.is_Boolean:
        return bool(value)
    return int(value) if value.is_integer else float(value)


def number_at(value: Any, rows: int) -> Any:
    """A number that may be symbolic (SymInt, SymFloat, SymBool), for a piece of `rows` rows."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _at(value.node.expr, rows)
    return value


def shape_at(value: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Shape of a traced tensor for a piece of `rows` rows."""
    return tuple(number_at(size, rows) for size in value.shape)


_ROWS = sympy.Symbol("rows", integer=True, positive=True)


@lru_cache(maxsize=100_000)
def _unified(expr: Any) -> Any:
    """An expression in the number of rows alone: every symbol of a traced model stands for it."""
    return sympy.expand(expr.replace(ToFloat, lambda value: value).subs(dict.fromkeys(expr.free_symbols, _ROWS)))


def depends_on_rows(value: Any) -> bool:
    """Whether a number differs for pieces of different sizes."""
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and bool(_unified(value.node.expr).free_symbols)


def multiple_of_rows(value: Any) -> int | None:
    """k where a number is k x rows for every number of rows; 0 for constants, None for anything else."""
    if not depends_on_rows(value):
        return 0
    if free_unbacked_symbols(value):
        return None
    factor = sympy.expand(_unified(value.node.expr) / _ROWS)
    return int(factor) if factor.is_Integer and factor > 0 else None


def condition(expr: Any) -> Callable[[int], bool]:
    """A condition on the sizes of a traced model as a function of the rows; true where nothing speaks against it."""
    unified = _unified(expr)
    if not unified.free_symbols:
        return lambda rows: unified != sympy.false
    return lambda rows: unified.subs(_ROWS, rows) != sympy.false


def is_number(value: Any) -> bool:
    """Whether a traced value is a number that depends on the rows alone."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not free_unbacked_symbols(value)


def is_plain_tensor(node: Node) -> bool:
    """Whether a node makes one tensor whose shape is known from the number of rows."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not free_unbacked_symbols(value.shape)


def polynomial(function: Any) -> Size:
    """The polynomial of degree 2 that has the values of `function` at 1, 2 and 3 rows."""
    one, two, three = (float(function(rows)) for rows in (1, 2, 3))
    c2 = (three - 2 * two + one) / 2
    c1 = two - one - 3 * c2
    return Size(one - c1 - c2, c1, c2)


def tensor_bytes(value: torch.Tensor) -> Size:
    """Bytes of a traced tensor as a function of the rows."""
    return polynomial(lambda rows: numel_at(value, rows) * value.element_size())


def numel_at(value: torch.Tensor, rows: int) -> int:
    """Elements of a traced tensor for a piece of `rows` rows."""
    count = 1
    for size in shape_at(value, rows):
        count *= size
    return count
