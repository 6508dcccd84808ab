"""Structural hashes: of a whole traced model (key of its deployment) and of parts (key of their costs).

Nodes are numbered, floats written as hex, every symbol is the number of rows. The whole model's hash includes
the names, types and flags of its parameters; a part's hash knows its parameters by type and shape alone, so
that equal layers have equal hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from rannd.graph.cut import Part
from rannd.graph.signature import Signature
from rannd.graph.trace import Traced, attribute, operator_name

_ROWS = sympy.Symbol("rows", integer=True, positive=True)


def graph_hash(traced: Traced, signature: Signature) -> str:
    """Hash of a traced model: equal in every process that traces the same model in the same way."""
    placed = iter(signature.tensors)
    first: dict[int, str] = {}

    def describe(node: Node) -> str:
        if node.op == "placeholder":
            spec = next(placed)
            return f"in|{spec.batch}|{spec.requires_grad}|{_value(node.meta.get('val'))}"
        name = traced.attributes[node]
        tensor = traced.tensor(node)
        alias = first.setdefault(id(tensor), name)
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        text = f"@{kind}|{name}|{alias}|{_value(tensor)}|{tensor.requires_grad}"
        return text + _content(traced.constants[name]) if name in traced.constants else text

    mode = signature.mode
    text = _text(traced.graph, traced.root, describe)
    outputs = f"{traced.outputs.spec}|{sorted(traced.outputs.constants.items())!r}|{traced.outputs.positions}"
    return _digest("\n".join((text, outputs, f"{mode.training}|{mode.grad}|{mode.autocast}")))


def part_hash(part: Part, requires_grad: Callable[[Node], bool], autocast: str = "") -> str:
    """Hash of a part: equal for parts that compute the same on other parameters of the same shapes.

    `requires_grad` tells which values and parameters of the traced graph get gradients, `autocast` the regions
    that the part runs in (they are not in its graph).
    """

    def describe(node: Node) -> str:
        source = node.meta["source"]
        return f"in|{requires_grad(source)}|{source.op == 'get_attr'}|{_value(node.meta.get('val'))}"

    return _digest(_text(part.module.graph, part.module, describe) + f"\n{autocast}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _content(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "|meta"
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return "|" + hashlib.sha256(bytes(raw.tolist())).hexdigest()


def _text(graph: Graph, root: GraphModule, describe: Callable[[Node], str]) -> str:
    """One line per node; `describe` gives the lines of placeholders and tensor attributes."""
    lines: list[str] = []
    names: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = attribute(root, str(node.target))
            if isinstance(value, GraphModule):
                names[node] = "{" + _text(value.graph, value, lambda inner: f"in|{_value(inner.meta.get('val'))}") + "}"
            else:
                names[node] = describe(node)
            continue
        names[node] = f"%{len(lines)}"
        if node.op == "placeholder":
            lines.append(describe(node))
        else:
            target = operator_name(node.target)
            arguments = f"{_argument(node.args, names)}|{_argument(node.kwargs, names)}"
            lines.append(f"{node.op}|{target}|{arguments}|{_value(node.meta.get('val'))}")
    return "\n".join(lines)


def _argument(value: Any, names: dict[Node, str]) -> str:
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
    return f"{type(value).__name__}:{value!r}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}({','.join(_number(size) for size in value.shape)})"
    if isinstance(value, (tuple, list)):
        return "(" + ";".join(_value(item) for item in value) + ")"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(value)
    return type(value).__name__ if value is None or not isinstance(value, (bool, int, float, str)) else repr(value)


def _number(value: Any) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        backed = {symbol: _ROWS for symbol in symbols if not str(symbol).startswith("u")}
        return str(expression.subs(backed))
    return str(value)
