"""Symbolic values: dtype of a tensor, and its shape as a function of the number of rows.

Only dimension 0 of batch tensors is symbolic during tracing, and it is always the number of rows of a microbatch. So
every size is an integer or an expression in one symbol, ROWS. Data-dependent sizes (`nonzero`) have symbols of their
own (unbacked symbols) and are unknown before the run.

Tracing yields torch's fake tensors; `abstract` converts them into these values, which are plain data: they can be
compared, stored and restored without torch's ShapeEnv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import sympy
import torch
from sympy.logic.boolalg import BooleanFunction
from torch.utils._sympy.functions import Mod, PythonMod, ToFloat
from torch.utils._sympy.symbol import SymT, symbol_is_type

ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""The number of rows of a microbatch."""

Dim: TypeAlias = "int | sympy.Expr"
"""A size: an integer, or an expression in ROWS."""


@dataclass(frozen=True, slots=True)
class TensorValue:
    """Dtype and symbolic shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]
    host: bool = False
    """Whether the model keeps it on the CPU, in a graph for another device."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Like torch.Tensor.is_floating_point."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Like torch.Tensor.is_complex."""
        return self.dtype.is_complex

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number computed from the number of rows or from tensor values."""

    kind: Literal["int", "float", "bool"]
    expr: Any
    """A sympy expression, or a condition for "bool"."""


Value: TypeAlias = "TensorValue | Number | tuple[Value, ...] | bool | int | float | str | None"
"""Value of a node. Anything else (a module in a get_attr node) is None."""


_KINDS: Mapping[type, Literal["int", "float", "bool"]] = {torch.SymFloat: "float", torch.SymBool: "bool"}
_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def length_symbol(name: str) -> sympy.Symbol:
    """Symbol n0, n1 ... of a dynamic dimension of a graph template (tracing/dynamic_shapes.py)."""
    return sympy.Symbol(name, integer=True, positive=True)


def with_lengths(value: Value, lengths: Mapping[sympy.Symbol, int]) -> Value:
    """Substitute sizes for the symbols of dynamic dimensions in a value."""
    if isinstance(value, TensorValue):
        return replace(value, shape=tuple(_put_in(size, tuple(lengths.items())) for size in value.shape))
    if isinstance(value, Number):
        return Number(value.kind, value.expr.subs(lengths))
    if isinstance(value, tuple):
        return tuple(with_lengths(item, lengths) for item in value)
    return value


@lru_cache(maxsize=100_000)
def _put_in(size: Dim, lengths: tuple[tuple[sympy.Symbol, int], ...]) -> Dim:
    if isinstance(size, int):
        return size
    found = size.subs(dict(lengths))
    return int(found) if found.is_Integer else found


def unknown_size(name: str) -> sympy.Symbol:
    """Symbol of a data-dependent number: integers u0, u1 ..., floats zuf0 ... ."""
    if name.startswith("zuf"):
        return sympy.Symbol(name, real=True)
    return sympy.Symbol(name, integer=True)


def abstract(value: Any, fixed: Mapping[sympy.Symbol, Any] | None = None, device: str = "cpu") -> Value:
    """Convert a traced (fake) value. Backed symbols become ROWS, except those mapped by `fixed`.

    `device` is the type of the device that the trace is for.
    """
    if isinstance(value, torch.Tensor):
        host = device != "cpu" and value.device.type == "cpu"
        return TensorValue(value.dtype, tuple(_dim(size, fixed) for size in value.shape), host)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = _unified(value.node.expr, _key(fixed))
        return Number("int" if isinstance(value, torch.SymInt) else _KINDS[type(value)], expr)
    if isinstance(value, (tuple, list)):
        return tuple(abstract(item, fixed, device) for item in value)
    if isinstance(value, (bool, int, float, str)):
        return value
    return None


def unified(expr: Any, fixed: Mapping[sympy.Symbol, Any] | None = None) -> Any:
    """Express an expression or condition recorded by tracing in ROWS, except for symbols mapped by `fixed`."""
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
    # PythonMod is equal where torch uses Mod (of numbers that are not negative), and can be evaluated everywhere.
    found = expr.replace(ToFloat, lambda value: value).replace(Mod, PythonMod).subs(replaced)
    return found if isinstance(found, BooleanFunction) else sympy.expand(found)  # And, Or, Not cannot be expanded
