"""What is known of a value before it is computed: the type of a tensor, and its shape as a function of the rows.

Only the first dimensions of batch tensors are symbolic when a model is traced, and all of them are the number of
rows of a piece. So every size is an integer or an expression in one symbol, ROWS. Sizes that depend on what is in
a tensor (`nonzero`) have symbols of their own, and are not known beforehand.

Tracing gives torch's own fake tensors; `abstract` turns them into these values, which are plain data: they can be
compared, stored, and made again without torch's shape environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.symbol import SymT, symbol_is_type

ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""The number of rows of a piece."""

Dim: TypeAlias = "int | sympy.Expr"
"""A size: a number, or an expression in ROWS."""


@dataclass(frozen=True, slots=True)
class TensorValue:
    """One tensor."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """As of a tensor."""
        return self.dtype.is_complex

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that is made of the number of rows, or of what is in a tensor."""

    kind: Literal["int", "float", "bool"]
    expr: Any
    """A sympy expression (or condition)."""


Value: TypeAlias = "TensorValue | Number | tuple[Value, ...] | bool | int | float | str | None"
"""What a node makes. Opaque things (a module in a get_attr node) are None."""


_KINDS: Mapping[type, Literal["int", "float", "bool"]] = {torch.SymFloat: "float", torch.SymBool: "bool"}
_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def length_symbol(name: str) -> sympy.Symbol:
    """The symbol n0, n1 ... of a dimension that is left open in a template (lengths.py)."""
    return sympy.Symbol(name, integer=True, positive=True)


def with_lengths(value: Value, lengths: Mapping[sympy.Symbol, int]) -> Value:
    """A value with sizes in the place of their symbols."""
    if isinstance(value, TensorValue):
        return TensorValue(value.dtype, tuple(_put_in(size, lengths) for size in value.shape))
    if isinstance(value, Number):
        return Number(value.kind, value.expr.subs(lengths))
    if isinstance(value, tuple):
        return tuple(with_lengths(item, lengths) for item in value)
    return value


def _put_in(size: Dim, lengths: Mapping[sympy.Symbol, int]) -> Dim:
    if isinstance(size, int):
        return size
    found = size.subs(lengths)
    return int(found) if found.is_Integer else found


def unknown_size(name: str) -> sympy.Symbol:
    """The symbol of a number that depends on what is in a tensor: u0, u1 ... integers, zuf0 ... floats."""
    if name.startswith("zuf"):
        return sympy.Symbol(name, real=True)
    return sympy.Symbol(name, integer=True)


def abstract(value: Any, fixed: Mapping[sympy.Symbol, Any] | None = None) -> Value:
    """The value that a traced (fake) one stands for. Symbols are the rows; `fixed` says what others stand for."""
    if isinstance(value, torch.Tensor):
        return TensorValue(value.dtype, tuple(_dim(size, fixed) for size in value.shape))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = _unified(value.node.expr, _key(fixed))
        return Number("int" if isinstance(value, torch.SymInt) else _KINDS[type(value)], expr)
    if isinstance(value, (tuple, list)):
        return tuple(abstract(item, fixed) for item in value)
    if isinstance(value, (bool, int, float, str)):
        return value
    return None


def unified(expr: Any, fixed: Mapping[sympy.Symbol, Any] | None = None) -> Any:
    """An expression or condition that tracing recorded, in the rows; `fixed` says what other symbols stand for."""
    return _unified(expr, _key(fixed))


def _dim(size: Any, fixed: Mapping[sympy.Symbol, Any] | None) -> Dim:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = _unified(size.node.expr, _key(fixed))
    return int(expr) if expr.is_Integer else expr


def _key(fixed: Mapping[sympy.Symbol, Any] | None) -> tuple[tuple[sympy.Symbol, Any], ...]:
    return tuple(fixed.items()) if fixed else ()


@lru_cache(maxsize=100_000)
def _unified(expr: Any, fixed: tuple[tuple[sympy.Symbol, Any], ...]) -> Any:
    known = dict(fixed)
    replaced = {}
    for symbol in expr.free_symbols:
        unbacked = symbol_is_type(symbol, _UNBACKED)
        replaced[symbol] = known.get(symbol, unknown_size(str(symbol)) if unbacked else ROWS)
    return sympy.expand(expr.replace(ToFloat, lambda value: value).subs(replaced))
