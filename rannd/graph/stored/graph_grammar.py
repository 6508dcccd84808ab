"""The grammar of a graph in a cached trace: nodes, what they call with which arguments, and their symbolic values."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import Any, Final

from torch import nn
from torch.fx import Graph, GraphModule

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.stored.encoding import DEVICES, DTYPES, ENUMS
from rannd.graph.stored.grammar_rules import (
    DEEPEST,
    MOST_DIMENSIONS,
    broken,
    each,
    identifier,
    mapping,
    natural,
    plain_list,
    record,
    scalar,
    text,
)
from rannd.graph.stored.operator_grammar import check_function
from rannd.graph.stored.size_grammar import LARGEST_POWER, Sizes

MOST_NODES: Final = 2**18
"""Nodes of a graph with the graphs inside of it."""
MOST_PARTS: Final = 64
"""Names in a path of modules."""

OF_MODULES = frozenset(dir(nn.Module()))
"""Attributes that every module has."""
_OF_GRAPHS = frozenset(dir(GraphModule(nn.Module(), Graph())))
"""Attributes that the module of a graph has by itself: its code would read these, and not what the trace put there."""


class GraphRule:
    """A rule for a graph and those inside of it."""

    def __init__(self, sizes: Sizes, *, leaves: bool = False) -> None:
        self._sizes = sizes
        self._leaves = leaves
        """Whether they may call parts of the user's model."""
        self._left = MOST_NODES

    def check(self, data: Any, tensors: Collection[str], depth: int = 0) -> None:
        """Check a graph whose get_attr nodes read `tensors` (checked paths) and inner graphs."""
        if depth > DEEPEST or not isinstance(data, dict) or data.keys() != {"nodes", "values", "inner"}:
            broken("a graph", data)
        nodes, values, inner = data["nodes"], data["values"], data["inner"]
        plain_list(nodes)
        plain_list(values)
        mapping(path, lambda graph: None)(inner)
        self._left -= len(nodes)
        if self._left < 0 or len(values) > len(nodes):
            broken("the number of nodes or values", [len(nodes), len(values)])
        for value in values:
            self._value(value, 0)
        begun = False
        for number, node in enumerate(nodes):
            if not isinstance(node, list) or len(node) != 8:
                broken("a node", node)
            op, name, target, args, kwargs, value, module, source = node
            identifier(name)
            text(module)
            text(source)
            if type(value) is not int or not 0 <= value < len(values):
                broken("a node's value", value)
            if op == "call_function":
                check_function(target, self._leaves)
            elif op == "get_attr":
                if type(target) is not str or (target not in tensors and target not in inner):
                    broken("an attribute", target)
            elif target != op or (op == "placeholder" and begun) or op not in ("placeholder", "output"):
                broken("a node", node)
            begun = begun or op in ("call_function", "output")
            _arguments(op, target, args, kwargs, number)
        for graph in inner.values():
            self.check(graph, (), depth + 1)

    def _value(self, value: Any, depth: int) -> None:
        """The symbolic value of a node."""
        if type(value) is not list:
            return scalar(value)
        if depth > DEEPEST or not value:
            broken("a value", value)
        tag, *items = value
        if tag in ("T", "H"):
            if not items or type(items[0]) is not str or items[0] not in DTYPES:
                broken("a tensor value", value)
            if len(items) > 1 + MOST_DIMENSIONS:
                broken("a tensor value", value)
            for size in items[1:]:
                self._sizes.check(size)
        elif tag == "N":
            if len(items) != 2 or items[0] not in ("int", "float", "bool"):
                broken("a number", value)
            self._sizes.check(items[1])
        elif tag == "t":
            for item in items:
                self._value(item, depth + 1)
        else:
            broken("a value", value)
        return None


def _arguments(op: Any, target: Any, args: Any, kwargs: Any, number: int) -> None:
    """The arguments of a node that has `number` before it."""
    argument(args, number)
    if not isinstance(args, list) or args[:1] != ["t"]:
        broken("the arguments of a node", args)
    if kwargs is not None:
        argument(kwargs, number)
        if not isinstance(kwargs, list) or kwargs[:1] != ["d"]:
            broken("the arguments of a node", kwargs)
        for key in kwargs[1::2]:
            identifier(key)
    if op != "call_function":
        return
    kind, where, name = target
    if where == LEAF and (len(args) < 2 or type(args[1]) is not str):
        broken("the arguments of a leaf", args)
    if kind == "py":
        _python_arguments(name, args[1:], kwargs)


def _python_arguments(name: str, args: list[Any], kwargs: Any) -> None:
    """Arguments of a function of Python, which takes numbers and tensors, and results of other nodes."""
    many = name in ("getitem", "sym_sum")
    if kwargs is not None or any(
        type(item) is str or (type(item) is list and item[0] in "ltds" and not many) for item in args
    ):
        broken(f"the arguments of {name}", args)
    if name in ("pow", "ipow", "lshift") and not (type(args[-1]) in (int, float) and abs(args[-1]) <= LARGEST_POWER):
        broken(f"the arguments of {name}", args)


def argument(value: Any, nodes: int = 0, depth: int = 0) -> None:
    """An argument of a node that has `nodes` before it."""
    if type(value) is not list:
        return scalar(value)
    if depth > DEEPEST or not value:
        broken("an argument", value)
    tag, *items = value
    if tag in ("l", "t", "d"):
        if tag == "d" and (len(items) % 2 or any(type(key) is list for key in items[::2])):
            broken("a dict", value)
        for item in items:
            argument(item, nodes, depth + 1)
    elif tag == "n":
        if len(items) != 1 or type(items[0]) is not int or not 0 <= items[0] < nodes:
            broken("a reference to a node", value)
    elif tag == "s":
        if len(items) != 3:
            broken("a slice", value)
        for item in items:
            argument(item, nodes, DEEPEST)
    elif tag == "c":
        if len(items) != 2 or any(type(item) not in (int, float) for item in items):
            broken("a complex number", value)
    elif tag == "device":
        if len(items) != 1 or type(items[0]) is not str or items[0] not in DEVICES:
            broken("a device", value)
    elif tag == "layout":
        if items != ["strided"]:
            broken("a layout", value)
    elif type(tag) is not str or len(items) != 1 or type(items[0]) is not str or items[0] not in ENUMS.get(tag, ()):
        broken("an argument", value)
    return None


def path(value: Any) -> None:
    """A path of modules: any names that modules may have, but no attribute that every module has."""
    text(value)
    parts = unicodedata.normalize("NFKC", value).split(".")  # as Python normalizes the names in code
    if len(parts) > MOST_PARTS or parts[0] in _OF_GRAPHS:
        broken("a path", value)
    if any(not part or part in OF_MODULES or part.startswith("__") for part in parts):
        broken("a path", value)


places: Final = each(record(natural, argument))
