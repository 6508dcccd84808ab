"""The grammar of a cached trace, checked whole before anything is built from it (docs/protocol.md, "Cached traces").

A cached trace may come from another machine. What it holds is data: names that end up in generated code are
identifiers, functions are those of fixed lists, operators are those of torch that compute tensors or those that the
program itself has registered, and all sizes are bounded.

Each rule is a function of a value that raises Broken.
"""

from __future__ import annotations

import keyword
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.stored.container_text import check_container
from rannd.graph.stored.encoding import DTYPES, ENUMS, EXPRESSIONS, Broken

MOST_GRAPH_BYTES: Final = 16 * 2**20
"""Size of a trace without the values of its constants."""
MOST_CONSTANT_BYTES: Final = 64 * 2**20
"""Size of the values of all constants of a trace."""
DEEPEST: Final = 48
"""Lists inside of each other, and graphs inside of graphs."""
LONGEST_TEXT: Final = 65_536
MOST_NODES: Final = 2**18
"""Nodes of a graph with the graphs inside of it."""
MOST_DIMENSIONS: Final = 64
"""Of a tensor."""
MOST_PARTS: Final = 64
"""Names in a path of modules."""
LARGEST_POWER: Final = 64
LARGEST_SIZE: Final = 256
"""Functions and arguments of a size."""
LARGEST_DEGREE: Final = 8
"""Symbols that a size multiplies with each other. Simplifying a product of sums costs as much as its expanded form."""

_OPERATOR: Final = (
    "abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imod imul inv invert ior ipow is_ is_not isub itruediv "
    "ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor"
)
_MATH: Final = "acos asin atan ceil cos cosh exp floor fabs isqrt log log10 log2 pow sin sinh sqrt tan tanh trunc"
_SYM: Final = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"
FUNCTIONS: Final[Mapping[str, frozenset[str]]] = {
    "_operator": frozenset(_OPERATOR.split()),
    "math": frozenset(_MATH.split()),
    "torch": frozenset(_SYM.split()),
}
"""Python functions that a graph may call, by module."""

_HIGHER_ORDER: Final = (
    "associative_scan cond flex_attention hints_wrapper map_impl scan strict_mode tag_activation_checkpoint while_loop "
    "wrap wrap_with_autocast wrap_with_set_grad_enabled"
)
HIGHER_ORDER: Final = frozenset(_HIGHER_ORDER.split())
"""Higher-order operators that a graph may call: they run its own subgraphs."""

_COMPUTING: Final = frozenset({"aten", "prims"})
"""Namespaces of torch's operators that compute tensors, and check what they get."""
_OTHERS: Final = (
    "_c10d_functional _c10d_functional_autograd _dtensor _native _native_aot _quantized _test c10d coor debug_mode_ops "
    "debugprims export flex_gemm fsdp inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prepacked profiler "
    "quantization quantized rngprims sparse static_runtime symm_mem"
)
TORCHS_OTHERS: Final = frozenset(_OTHERS.split())
"""Torch's other namespaces: communication, files, and internal operators that trust their arguments."""
_REFUSED: Final = re.compile(r"from_file|save|_reshape_alias(_copy)?|_nested_view_from_.*|.*_tensor_unsafe")
"""Of `aten`: operators that touch files, and those that do not check sizes, strides or indices."""
_VALUES: Final = "Device Generator SymBool SymFloat SymInt Tensor bool complex float int number"
_VALUE_TYPES: Final = frozenset(_VALUES.split())
_CONTAINER_TYPES: Final = re.compile(r"Optional\[|List\[|\]")

_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,511}", re.ASCII)
_OPERATOR_NAME = re.compile(r"[A-Za-z_]\w{0,127}::[A-Za-z_]\w{0,255}", re.ASCII)
_OVERLOAD = re.compile(r"\w{1,128}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,4})?", re.ASCII)
_FLOAT = re.compile(r"[-+]?\d{0,400}\.?\d{0,400}([eE][-+]?\d{1,4})?", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_OF_MODULES = frozenset(dir(nn.Module()))
_OF_GRAPHS = frozenset(dir(GraphModule(nn.Module(), Graph())))
"""Attributes that the module of a graph has by itself: its code would read these, and not what the trace put there."""

Rule = Callable[[Any], object]


def check_trace(data: Any) -> None:
    """Check a decoded trace, without the values of its constants."""
    fields: dict[str, Rule] = {
        "attributes": _attributes,
        "changes": _texts,
        "constants": _mapping(_text, _tensor),
        "decisions": _maybe(_decisions),
        "fixed_rows": _maybe(_natural),
        "format": _natural,
        "graph": lambda graph: _graph(graph, data["attributes"], bool(data["leaves"]), 0, [MOST_NODES]),
        "holes": _naturals,
        "leaves": _maybe(_mapping(_text, _leaf_call)),
        "outputs": _tuple(check_container, _places, _naturals),
        "record": _texts,
        "whole": _naturals,
    }
    if not isinstance(data, dict) or data.keys() != fields.keys():
        _broken("the fields", data)
    for name, rule in fields.items():
        rule(data[name])


def check_operator(target: Any) -> None:
    """Check that an operator that was found by name may be called."""
    if not isinstance(target, torch._ops.OpOverload):
        _broken("an operator", target)
    namespace, name = target._schema.name.split("::")
    given = [str(argument.type) for argument in target._schema.arguments]
    if namespace in TORCHS_OTHERS:
        _broken("an operator", target)
    if namespace in _COMPUTING:
        if _REFUSED.fullmatch(name) or any(argument.name == "filename" for argument in target._schema.arguments):
            _broken("an operator", target)
    elif target._schema.name != LEAF and not all(_CONTAINER_TYPES.sub("", each) in _VALUE_TYPES for each in given):
        _broken(f"an operator that takes ({', '.join(given)})", target)


# -- graphs -------------------------------------------------------------------------------------------------------


def _graph(data: Any, tensors: Collection[str], leaves: bool, depth: int, left: list[int]) -> None:
    """A graph whose get_attr nodes read `tensors` (checked paths) and inner graphs.

    `leaves`: whether it may call these; `left`: how many nodes it may have, counted down.
    """
    if depth > DEEPEST or not isinstance(data, dict) or data.keys() != {"nodes", "values", "inner"}:
        _broken("a graph", data)
    nodes, values, inner = data["nodes"], data["values"], data["inner"]
    _list(nodes)
    _list(values)
    _mapping(_path, lambda each: None)(inner)
    left[0] -= len(nodes)
    if left[0] < 0 or len(values) > len(nodes):
        _broken("the number of nodes or values", [len(nodes), len(values)])
    for value in values:
        _value(value, 0)
    begun = False
    for number, node in enumerate(nodes):
        if not isinstance(node, list) or len(node) != 7:
            _broken("a node", node)
        op, name, target, args, kwargs, value, module = node
        _identifier(name)
        _text(module)
        if type(value) is not int or not 0 <= value < len(values):
            _broken("a node's value", value)
        if op == "call_function":
            _target(target, leaves)
        elif op == "get_attr":
            if type(target) is not str or (target not in tensors and target not in inner):
                _broken("an attribute", target)
        elif target != op or (op == "placeholder" and begun) or op not in ("placeholder", "output"):
            _broken("a node", node)
        begun = begun or op in ("call_function", "output")
        _arguments(op, target, args, kwargs, number)
    for each in inner.values():
        _graph(each, (), leaves, depth + 1, left)


def _arguments(op: Any, target: Any, args: Any, kwargs: Any, number: int) -> None:
    """The arguments of a node that has `number` before it."""
    _argument(args, number, 0)
    if not isinstance(args, list) or args[:1] != ["t"]:
        _broken("the arguments of a node", args)
    if kwargs is not None:
        _argument(kwargs, number, 0)
        if not isinstance(kwargs, list) or kwargs[:1] != ["d"]:
            _broken("the arguments of a node", kwargs)
        for key in kwargs[1::2]:
            _identifier(key)
    if op != "call_function":
        return
    kind, where, name = target
    if where == LEAF and (len(args) < 2 or type(args[1]) is not str):
        _broken("the arguments of a leaf", args)
    if kind == "py":
        _python_arguments(name, args[1:], kwargs)


def _python_arguments(name: str, args: list[Any], kwargs: Any) -> None:
    """Arguments of a function of Python, which takes numbers and tensors, and results of other nodes."""
    many = name in ("getitem", "sym_sum")
    if kwargs is not None or any(
        type(each) is str or (type(each) is list and each[0] in "ltds" and not many) for each in args
    ):
        _broken(f"the arguments of {name}", args)
    if name in ("pow", "ipow", "lshift") and not (type(args[-1]) in (int, float) and abs(args[-1]) <= LARGEST_POWER):
        _broken(f"the arguments of {name}", args)


def _target(target: Any, leaves: bool) -> None:
    if not isinstance(target, list) or len(target) != 3 or any(type(each) is not str for each in target):
        _broken("a function", target)
    kind, where, name = target
    if kind == "op":
        right = bool(_OPERATOR_NAME.fullmatch(where) and _OVERLOAD.fullmatch(name)) and (where != LEAF or leaves)
    elif kind == "hop":
        right = where in HIGHER_ORDER and not name
    else:
        right = kind == "py" and name in FUNCTIONS.get(where, ())
    if not right:
        _broken("a function", target)


def _argument(value: Any, nodes: int, depth: int) -> None:
    """An argument of a node that has `nodes` before it."""
    if type(value) is not list:
        return _scalar(value)
    if depth > DEEPEST or not value:
        _broken("an argument", value)
    tag, *items = value
    if tag in ("l", "t", "d"):
        if tag == "d" and (len(items) % 2 or any(type(key) is list for key in items[::2])):
            _broken("a dict", value)
        for item in items:
            _argument(item, nodes, depth + 1)
    elif tag == "n":
        if len(items) != 1 or type(items[0]) is not int or not 0 <= items[0] < nodes:
            _broken("a reference to a node", value)
    elif tag == "s":
        if len(items) != 3:
            _broken("a slice", value)
        for item in items:
            _argument(item, nodes, DEEPEST)
    elif tag == "c":
        if len(items) != 2 or any(type(item) not in (int, float) for item in items):
            _broken("a complex number", value)
    elif tag == "device":
        if len(items) != 1 or type(items[0]) is not str or not _DEVICE.fullmatch(items[0]):
            _broken("a device", value)
    elif type(tag) is not str or len(items) != 1 or type(items[0]) is not str or items[0] not in ENUMS.get(tag, ()):
        _broken("an argument", value)
    return None


def _constant(value: Any) -> None:
    _argument(value, 0, 0)


def _value(value: Any, depth: int) -> None:
    """The symbolic value of a node."""
    if type(value) is not list:
        return _scalar(value)
    if depth > DEEPEST or not value:
        _broken("a value", value)
    tag, *items = value
    if tag == "T":
        if not items or type(items[0]) is not str or items[0] not in DTYPES:
            _broken("a tensor value", value)
        if len(items) > 1 + MOST_DIMENSIONS:
            _broken("a tensor value", value)
        for size in items[1:]:
            check_size(size)
    elif tag == "N":
        if len(items) != 2 or items[0] not in ("int", "float", "bool"):
            _broken("a number", value)
        check_size(items[1])
    elif tag == "t":
        for item in items:
            _value(item, depth + 1)
    else:
        _broken("a value", value)
    return None


def check_size(data: Any) -> None:
    """Check a size, or a condition on sizes, of a small degree and with small powers."""
    left = [LARGEST_SIZE]

    def degree(each: Any, depth: int) -> int:
        """That of the polynomial which the size is at most, after checking it."""
        left[0] -= 1
        if left[0] < 0 or depth > DEEPEST:
            _broken("a size", data)
        if type(each) is bool or (type(each) is int and -(2**63) <= each < 2**63):
            return 0
        if not isinstance(each, list) or not each or type(each[0]) is not str:
            _broken("a size", each)
        tag, *items = each
        found = 0
        if tag == "y":
            right = len(items) == 1 and type(items[0]) is str and bool(_SYMBOL.fullmatch(items[0]))
            found = 1
        elif tag == "q":
            right = len(items) == 2 and all(type(item) is int for item in items) and items[1] > 0
        elif tag == "f":
            right = len(items) == 1 and type(items[0]) is str and bool(_FLOAT.fullmatch(items[0]))
            right = right and math.isfinite(float(items[0]))
        elif "Pow" in tag:
            power = _power(items[1]) if tag in EXPRESSIONS and len(items) == 2 else 0
            right = power > 0
            if right:
                found = degree(items[0], depth + 1) * power
                right = bool(found) or not isinstance(items[0], list) or items[0][0] in ("q", "f")
        else:
            right = tag in EXPRESSIONS and bool(items)
            inside = [degree(item, depth + 1) for item in items] if right else [0]
            found = sum(inside) if tag == "Mul" else max(inside)
        if not right or found > LARGEST_DEGREE:
            _broken("a size", each)
        return found

    degree(data, 0)


def _power(power: Any) -> int:
    """How often a factor is multiplied at most, at least once; 0 for what is no small number."""
    number, of = power[1:] if isinstance(power, list) and len(power) == 3 and power[0] == "q" else (power, 1)
    if type(number) is not int or type(of) is not int or not 0 < of <= LARGEST_POWER:
        return 0
    return max(1, -(-abs(number) // of)) if abs(number) <= LARGEST_POWER else 0


# -- the rest of a trace ------------------------------------------------------------------------------------------


def _decisions(data: Any) -> None:
    _tuple(lambda graph: None, _mapping(_path, _tensor), _each(_bool), _texts)(data)
    _graph(data[0], data[1], False, 0, [MOST_NODES])


def _attributes(data: Any) -> None:
    _mapping(_path, _text)(data)


def _leaf_call(data: Any) -> None:
    _tuple(
        _text, check_container, _each(_source), _each(_source), _naturals, _places,
        _each(_tuple(_dtype, _sizes, _bool)), check_container, _naturals, _places, _bool,
    )(data)  # fmt: skip
    module, found, method = data[0].partition("..")
    if found and not method.startswith("function "):
        _method(method)
        if any(type(value) is str for _, value in data[5]):
            _broken(f"a string for the method {method} of module {module}", data[5])


def _method(name: str) -> None:
    """A method of the user's own: not one of every module, and none with a meaning for Python."""
    if not _IDENTIFIER.fullmatch(name) or name.startswith("__") or name in _OF_MODULES:
        _broken("a method", name)


# -- simple rules -------------------------------------------------------------------------------------------------


def _scalar(value: Any) -> None:
    if type(value) is str:
        _text(value)
    elif value is not None and type(value) not in (bool, int, float):
        _broken("a value", value)


def _text(value: Any) -> None:
    if type(value) is not str or len(value) > LONGEST_TEXT:
        _broken("a text", value)


def _identifier(value: Any) -> None:
    if type(value) is not str or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value) or value == "self":
        _broken("a name", value)


def _path(value: Any) -> None:
    """A path of modules: any names that modules may have, but no attribute that every module has."""
    _text(value)
    parts = unicodedata.normalize("NFKC", value).split(".")  # as Python normalizes the names in code
    if len(parts) > MOST_PARTS or parts[0] in _OF_GRAPHS:
        _broken("a path", value)
    if any(not part or part in _OF_MODULES or part.startswith("__") for part in parts):
        _broken("a path", value)


def _natural(value: Any) -> None:
    if type(value) is not int or not 0 <= value < 2**31:
        _broken("a number", value)


def _bool(value: Any) -> None:
    if type(value) is not bool:
        _broken("a truth value", value)


def _list(value: Any) -> None:
    if not isinstance(value, list):
        _broken("a list", value)


def _source(value: Any) -> None:
    _text(value) if type(value) is str else _natural(value)


def _dtype(value: Any) -> None:
    if type(value) is not str or value not in DTYPES:
        _broken("a dtype", value)


def _sizes(value: Any) -> None:
    _list(value)
    if len(value) > MOST_DIMENSIONS:
        _broken("the sizes of a tensor", value)
    for size in value:
        if size is not None:
            check_size(size)


def _tensor(value: Any) -> None:
    """A constant: its dtype, its shape, and as many bytes as they take; nil without values."""
    _tuple(_dtype, _naturals, lambda raw: None)(value)
    dtype, shape, raw = value
    if len(shape) > MOST_DIMENSIONS:
        _broken("the shape of a constant", shape)
    count = math.prod(shape)
    if raw is not None and (type(raw) is not bytes or len(raw) != count * DTYPES[dtype].itemsize):
        _broken(f"the bytes of a constant of {shape} {dtype}", raw)


def _maybe(rule: Rule) -> Rule:
    return lambda value: None if value is None else rule(value)


def _each(rule: Rule) -> Rule:
    def check(value: Any) -> None:
        _list(value)
        for each in value:
            rule(each)

    return check


def _tuple(*rules: Rule) -> Rule:
    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(rules):
            _broken(f"a list of {len(rules)}", value)
        for rule, each in zip(rules, value, strict=True):
            rule(each)

    return check


def _mapping(key: Rule, value: Rule) -> Rule:
    def check(data: Any) -> None:
        if not isinstance(data, dict):
            _broken("a mapping", data)
        for name, each in data.items():
            key(name)
            value(each)

    return check


_texts: Final = _each(_text)
_naturals: Final = _each(_natural)
_places: Final = _each(_tuple(_natural, _constant))


def _broken(what: str, value: Any) -> NoReturn:
    told = repr(value) if not isinstance(value, (list, dict)) else repr(_few(value))
    raise Broken(f"{what}: {told if len(told) < 200 else told[:200] + ' ..'}")


def _few(value: Sequence[Any] | Mapping[Any, Any]) -> list[Any]:
    """The first elements of a value for messages: repr of all of it may take long."""
    return [each if not isinstance(each, (list, dict)) else type(each).__name__ for each in list(value)[:8]]
