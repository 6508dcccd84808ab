"""Plain-data encoding of node arguments, values and sizes, used by `codec`.

list            ["l", item, ...]          node      ["n", number]         dtype     ["dtype", "float32"]
tuple           ["t", item, ...]          slice     ["s", start, stop, step]
dict            ["d", key, value, ...]    complex   ["c", real, imaginary]
tensor value    ["T", dtype, size, ...]   number    ["N", kind, expression]
  on the CPU    ["H", dtype, size, ...]   device    ["device", type]
expression      integer | ["y", symbol] | ["q", p, q] | ["f", text] | [function, argument, ...]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy import functions

from rannd.device.identity import CUDA
from rannd.graph.fx.symbolic_values import ROWS, Number, TensorValue, length_symbol, unknown_size

_SYMPY = "Add Mul Pow Mod Max Min floor ceiling Eq Ne Lt Le Gt Ge And Or Not Abs"
_TORCH = (
    "FloorDiv CleanDiv CeilToInt FloorToInt IntTrueDiv FloatTrueDiv PythonMod ModularIndexing RoundToInt TruncToInt "
    "TruncToFloat ToFloat FloatPow PowByNatural Where Max Min"
)
_FUNCTIONS: dict[str, Any] = {name: getattr(sympy, name) for name in _SYMPY.split()}
_FUNCTIONS.update({name: getattr(functions, name) for name in _TORCH.split() if hasattr(functions, name)})
_NAMES = {function: name for name, function in _FUNCTIONS.items()}

EXPRESSIONS = frozenset(_FUNCTIONS)
"""Names of the functions that a size may be made of."""

_ENUMS = {torch.layout: "layout", torch.memory_format: "memory_format", torch.dtype: "dtype"}
ENUMS: dict[str, dict[str, Any]] = {
    tag: {name: value for name, value in vars(torch).items() if isinstance(value, kind)} for kind, tag in _ENUMS.items()
}
"""torch's dtypes, layouts and memory formats, by kind and name."""
DTYPES: dict[str, torch.dtype] = ENUMS["dtype"]
DEVICES = ("cpu", CUDA, "meta")
"""Types of devices that a graph may name; ordinals are those of the rank that runs it."""


class Uncodable(Exception):
    """A traced model contains something that cannot be serialized."""


class Broken(Exception):
    """Serialized data is invalid, of another version, or does not fit the model."""


def argument(value: Any, numbers: Mapping[Node, int]) -> Any:
    """Encode an argument of a node; nodes become their `numbers`. Raises Uncodable."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        if kind is int and not -(2**63) <= value < 2**63:
            raise Uncodable(f"the number {value}")
        return value
    if isinstance(value, Node):
        return ["n", numbers[value]]
    if isinstance(value, list):
        return ["l", *[argument(item, numbers) for item in value]]
    if kind is tuple:
        return ["t", *[argument(item, numbers) for item in value]]
    if isinstance(value, dict):
        return ["d", *[argument(each, numbers) for pair in value.items() for each in pair]]
    if isinstance(value, slice):
        return ["s", *[argument(each, numbers) for each in (value.start, value.stop, value.step)]]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is torch.device:
        if value.type not in DEVICES:
            raise Uncodable(f"the device {value}")
        return ["device", value.type]
    if kind in _ENUMS:
        return [_ENUMS[kind], str(value).removeprefix("torch.")]
    raise Uncodable(f"an argument {value!r} of type {kind.__module__}.{kind.__qualname__}")


def to_argument(value: Any, nodes: list[Node]) -> Any:
    """Decode an argument of a node."""
    if type(value) is not list:
        return value
    tag = value[0]
    if tag == "n":
        return nodes[value[1]]
    if tag in ("l", "t"):
        items = [to_argument(item, nodes) if type(item) is list else item for item in value[1:]]
        return items if tag == "l" else tuple(items)
    items = [to_argument(item, nodes) for item in value[1:]]
    if tag == "d":
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == "s":
        return slice(*items)
    if tag == "c":
        return complex(*items)
    if tag == "device":
        return torch.device(items[0])
    if tag in ENUMS and items[0] in ENUMS[tag]:
        return ENUMS[tag][items[0]]
    raise Broken(f"an argument {value}")


def value_data(value: Any) -> Any:
    """Encode the symbolic value of a node (symbolic_values.py). Raises Uncodable."""
    if isinstance(value, TensorValue):
        return [
            "H" if value.host else "T",
            str(value.dtype).removeprefix("torch."),
            *[expression(size) for size in value.shape],
        ]
    if isinstance(value, Number):
        return ["N", value.kind, expression(value.expr)]
    if isinstance(value, tuple):
        return ["t", *[value_data(item) for item in value]]
    return argument(value, {})


def to_value(value: Any) -> Any:
    """Decode a symbolic value."""
    if type(value) is not list:
        return value
    tag, *rest = value
    if tag in ("T", "H"):
        sizes = tuple(size if type(size) is int else to_expression(size) for size in rest[1:])
        return TensorValue(DTYPES[rest[0]], sizes, tag == "H")
    if tag == "N":
        return Number(rest[0], to_expression(rest[1]))
    if tag == "t":
        return tuple(to_value(item) for item in rest)
    raise Broken(f"a value {value}")


def expression(expr: Any) -> Any:
    """Encode a size, or a condition on sizes. Raises Uncodable."""
    if type(expr) is int:
        return expr
    found = _expression_tree(expr)
    if to_expression(found) != expr:
        raise Uncodable(f"the size {expr}")
    return found


def _expression_tree(expr: Any) -> Any:
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return ["q", int(expr.p), int(expr.q)]
    if isinstance(expr, sympy.Float):
        return ["f", str(expr)]
    if isinstance(expr, sympy.Symbol):
        return ["y", expr.name]
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if type(expr) not in _NAMES:
        raise Uncodable(f"a size made by {type(expr).__qualname__}")
    return [_NAMES[type(expr)], *[_expression_tree(argument) for argument in expr.args]]


def to_expression(data: Any) -> Any:
    """Decode a size or condition."""
    if type(data) is bool:
        return sympy.true if data else sympy.false
    if type(data) is int:
        return sympy.Integer(data)
    return _built(json.dumps(data))  # a trace has few sizes, and each in many places


@lru_cache(maxsize=10_000)
def _built(text: str) -> Any:
    tag, *rest = json.loads(text)
    if tag == "y":
        name = rest[0]
        return ROWS if name == ROWS.name else length_symbol(name) if name.startswith("n") else unknown_size(name)
    if tag == "q":
        return sympy.Rational(*rest)
    if tag == "f":
        return sympy.Float(rest[0])
    return _FUNCTIONS[tag](*[to_expression(item) for item in rest])
