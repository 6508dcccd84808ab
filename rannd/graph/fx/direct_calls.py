"""Modules of graphs whose code calls operators without a detour through Python.

torch.fx writes a call of an operator as ``torch.ops.aten.mm.default(a, b)``: four attributes are looked up, and a
function in Python calls the one in C++ that does the work. In a graph of many small operators the host feels this. Here
each operator's function in C++ is looked up once, before the first call.

torch's compiler does not trace such code: what it gets is a graph of its own (rannd/runtime/compiling/kinds.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule

from rannd.graph.fx.fx_names import graph_module

_CALL = re.compile(r"^(\s*\w+(?:\s*:[^=\n]*)? = )(torch\.ops\.(\w+)\.(\w+)\.(\w+))(?=\()", re.MULTILINE)
"""A statement that calls an operator; text in its arguments is none, since line ends in it are escaped."""


def direct_module(root: nn.Module, graph: Graph, name: str) -> GraphModule:
    """As `graph_module`; the graph's code calls operators directly, also after `recompile`."""
    graph.on_generate_code(lambda _: _direct)
    return graph_module(root, graph, name)


def _direct(body: Sequence[str]) -> list[str]:
    """Code of a graph in which operators are called by local names."""
    code = "".join(body)
    local: dict[str, str] = {}

    def call(found: re.Match[str]) -> str:
        result, operator, *names = found.groups()
        if operator not in local:
            if type(_operator(*names)) is not OpOverload:
                return found[0]
            given = "_".join(names)
            while given in local.values() or re.search(rf"\b{given}\b", code):  # a node has this name
                given += "_"
            local[operator] = given
        return result + local[operator]

    code = _CALL.sub(call, code)
    return [*(f"{given} = {operator}.op\n" for operator, given in local.items()), code]


def _operator(namespace: str, packet: str, overload: str) -> object:
    return getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
