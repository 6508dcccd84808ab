"""Structural hashes of a whole traced model (the key of its deployment) and of its operators (equal in equal layers).

Nodes are numbered, floats are written as hex, and every symbol is the number of rows. The model's hash includes the
names, dtypes and flags of its parameters; an operator's hash only their dtypes, shapes and flags. block_hash.py
combines the hashes of operators into hashes of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.call.signature import Signature
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import call_of
from rannd.graph.fx.sizes import is_number
from rannd.graph.fx.symbolic_values import ROWS, Number, TensorValue
from rannd.graph.fx.traced import Traced, attribute, operator_name
from rannd.graph.modules.methods import kind_of
from rannd.graph.partition.placement import Placement


def graph_hash(traced: Traced, signature: Signature, model: nn.Module) -> str:
    """Hash of a traced model, equal in every process that traces the same model in the same way.

    What no operator reads counts as well, since plans say which stage holds it.
    """
    placed = iter(signature.tensors)
    first: dict[int, str] = {}
    tensors = {node: traced.tensor(node) for node in traced.attributes}

    def describe(node: Node) -> str:
        if node.op == "placeholder":
            spec = next(placed)
            return f"in|{spec.batch}|{spec.requires_grad}|{_value(node.meta.get('val'))}"
        name = traced.attributes[node]
        tensor = tensors[node]
        alias = first.setdefault(id(tensor), name)
        text = f"@{_kind(tensor)}|{name}|{alias}|{tensor.dtype}{tuple(tensor.shape)}|{tensor.requires_grad}"
        return text + _content(traced.constants[name]) if name in traced.constants else text

    mode = signature.mode
    told = "" if mode.dropout is None else f"|dropout {mode.dropout}"
    text = _text(traced.graph, traced.root, describe, tensors)
    outputs = f"{traced.outputs.spec}|{sorted(traced.outputs.constants.items())!r}|{traced.outputs.positions}"
    read = set(map(id, tensors.values()))
    state = [*model.named_parameters(), *model.named_buffers()]
    unread = [f"{_kind(each)}|{name}|{each.dtype}{tuple(each.shape)}" for name, each in state if id(each) not in read]
    return _digest("\n".join((text, outputs, f"{mode.training}|{mode.grad}|{mode.autocast}{told}", *unread)))


def text_of(root: GraphModule) -> str:
    """Text of a graph without the names of its nodes; equal for graphs that compute the same."""
    return _nested(root)


@dataclass(frozen=True)
class Structure:
    """Hash of one operator independent of its position in the model, with the values it reads."""

    digest: str
    inputs: tuple[Node, ...]
    """Placed nodes and arguments it reads, directly or through recomputed ones, each once, in order of first use."""
    tensors: tuple[Node, ...]
    """One get_attr node for each parameter, buffer and constant it reads, likewise."""


def structures(traced: Traced, placement: Placement, autocast: str) -> dict[Node, Structure]:
    """Compute the structure of every node that computes a value.

    A recomputed node is part of its readers' digests, as a function of what it reads. `autocast` names the autocast
    state that the model was traced in: it changes what an operator computes, and the graph does not show it.
    """
    found: dict[Node, Structure] = {}
    for node in traced.graph.nodes:
        if node.op == "call_function" and not is_number(node.meta.get("val")):
            found[node] = _Reader(traced, placement, found).structure(node, autocast)
    return found


class _Reader:
    """Builds the structure of one node, numbering what it reads by first use."""

    def __init__(self, traced: Traced, placement: Placement, known: Mapping[Node, Structure]) -> None:
        self._traced = traced
        self._placement = placement
        self._known = known
        self._symbols = _Symbols()
        self._inputs: dict[Node, str] = {}
        self._tensors: dict[str, tuple[Node, str]] = {}
        self._lines: list[str] = []

    def structure(self, node: Node, autocast: str) -> Structure:
        names = {source: self._name(source) for source in node.all_input_nodes}
        gradient = node in self._placement.requires_grad
        self._lines.append(f"{_line(node, names, self._symbols)}|{gradient}|{autocast}")
        tensors = tuple(source for source, _ in self._tensors.values())
        return Structure(_digest("\n".join(self._lines))[:32], tuple(self._inputs), tensors)

    def _name(self, source: Node) -> str:
        value = source.meta.get("val")
        if is_number(value):
            return f"#{_value(value)}"
        if source in self._traced.attributes:
            return self._tensor(source)
        if source.op == "get_attr":
            return _nested(attribute(self._traced.root, str(source.target)))
        if source not in self._placement.recomputed:
            return self._input(source)
        made = self._known[source]
        reads = [*(self._input(each) for each in made.inputs), *(self._tensor(each) for each in made.tensors)]
        return f"{made.digest}({','.join(reads)})"

    def _input(self, source: Node) -> str:
        if source not in self._inputs:
            self._inputs[source] = f"<{len(self._inputs)}"
            gradient = source in self._placement.requires_grad
            self._lines.append(f"{gradient}|{_value(source.meta.get('val'), self._symbols)}")
        return self._inputs[source]

    def _tensor(self, source: Node) -> str:
        name = self._traced.attributes[source]
        if name not in self._tensors:
            self._tensors[name] = (source, f"@{len(self._tensors)}")
            tensor = self._traced.tensor(source)
            gradient = source in self._placement.requires_grad
            self._lines.append(f"{_kind(tensor)}|{gradient}|{tensor.dtype}{tuple(tensor.shape)}")
        return self._tensors[name][1]


class _Symbols(dict[Any, str]):
    """Names for data-dependent sizes by first use, since tracing numbers them across the whole model."""

    def __missing__(self, symbol: Any) -> str:
        self[symbol] = name = f"unknown{len(self)}"
        return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "tensor"


def _content(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "|meta"
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return "|" + hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _text(graph: Graph, root: nn.Module, describe: Callable[[Node], str], tensors: Container[Node] = ()) -> str:
    """Text of a graph, one line per node; `describe` returns those of placeholders and of attributes: of `tensors`."""
    lines: list[str] = []
    names: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = None if node in tensors else attribute(root, str(node.target))
            names[node] = _nested(value) if isinstance(value, GraphModule) else describe(node)
            continue
        names[node] = f"%{len(lines)}"
        lines.append(describe(node) if node.op == "placeholder" else _line(node, names))
    return "\n".join(lines)


def _nested(root: GraphModule) -> str:
    """Text of a no_grad or autocast subgraph."""
    return "{" + _text(root.graph, root, lambda inner: f"in|{_value(inner.meta.get('val'))}") + "}"


def _line(node: Node, names: Mapping[Node, str], symbols: _Symbols | None = None) -> str:
    """Text of a node: its operator, arguments (named by `names`) and result."""
    target = operator_name(node.target)
    args = (_leaf(str(node.args[0])), *node.args[1:]) if target == LEAF else node.args
    arguments = f"{_argument(args, names)}|{_argument(node.kwargs, names)}"
    return f"{node.op}|{target}|{arguments}|{_value(node.meta.get('val'), symbols)}"


def _argument(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_argument(item, names) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_argument(value[key], names)}" for key in sorted(value)) + "}"
    if isinstance(value, slice):
        return "slice" + _argument((value.start, value.stop, value.step), names)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.device):
        return f"device:{value.type}"  # the ordinal differs between ranks
    return f"{type(value).__name__}:{value!r}"


def _value(value: Any, symbols: _Symbols | None = None) -> str:
    if isinstance(value, TensorValue):
        sizes = ",".join([_size(size, symbols) for size in value.shape])
        return f"{value.dtype}({sizes}){'@cpu' * value.host}"
    if isinstance(value, tuple):
        return "(" + ";".join([_value(item, symbols) for item in value]) + ")"
    if isinstance(value, Number):
        return f"{value.kind}:{_size(value.expr, symbols)}"
    return repr(value)


def _size(size: Any, symbols: _Symbols | None) -> str:
    if type(size) is int:
        return str(size)
    unknown = () if symbols is None else _unknown(size)
    return _expression(size) if symbols is None or not unknown else _renamed(size, unknown, symbols)


@lru_cache(maxsize=100_000)
def _expression(expr: Any) -> str:
    return str(expr)


@lru_cache(maxsize=100_000)
def _unknown(expr: Any) -> tuple[Any, ...]:
    """Symbols of an expression other than the number of rows."""
    return tuple(sorted(expr.free_symbols - {ROWS}, key=str))


def _renamed(expr: Any, unknown: tuple[Any, ...], symbols: _Symbols) -> str:
    names = {symbol: sympy.Symbol(symbols[symbol], integer=True) for symbol in unknown}
    return str(expr.xreplace(names))


def _leaf(key: str) -> str:
    """Text of an opaque module's call: its inputs and outputs, and the classes of its modules.

    Attributes are left out: the module's code may change them on the ranks that run it.
    """
    table, call = call_of(key)
    module = table.module(call.path)
    parts = [repr(replace(call, path=""))]
    for name, each in module.named_modules():
        parts.append(f"{name}:{type(each).__module__}.{kind_of(each)}:{each.training}")
    return "leaf{" + "|".join(parts) + "}"
