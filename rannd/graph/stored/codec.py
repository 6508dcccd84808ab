"""Serialize traced models for the cache, and deserialize them.

The data holds the graph, the metadata of its values, constants, opaque calls, and the names (not the values) of the
parameters and buffers that it reads. The format is zlib-compressed msgpack of lists and plain values. It contains no
code: operators and classes are looked up by name among those of torch and the running program. What it may contain is
the grammar of `trace_grammar`, checked when it is written and before anything is built from it. Models with anything
else are not stored (Uncodable).
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import sympy
import torch
from msgspec import Meta
from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.fx_names import graph_module
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import LeafCall, LeafOutput, LeafTable, call_name
from rannd.graph.fx.symbolic_values import with_lengths
from rannd.graph.fx.traced import Decisions, OutputSpec, Traced, attribute
from rannd.graph.modules.autograd_functions import found_by_name, function_name, is_function
from rannd.graph.stored import container_text
from rannd.graph.stored.encoding import (
    DTYPES,
    Broken,
    Uncodable,
    argument,
    expression,
    to_argument,
    to_expression,
    to_value,
    value_data,
)
from rannd.graph.stored.grammar_rules import MOST_DIMENSIONS
from rannd.graph.stored.operator_grammar import FUNCTIONS, check_operator
from rannd.graph.stored.soundness import check_sound
from rannd.graph.stored.trace_grammar import MOST_CONSTANT_BYTES, MOST_GRAPH_BYTES, check_trace

FORMAT = 6
_PYTHON: Mapping[str, Any] = {"_operator": operator, "math": math, "torch": torch}
"""Python modules whose functions (`FUNCTIONS`) a graph may call besides operators."""


def encode(traced: Traced, fixed_rows: int | None) -> bytes:
    """Serialize a traced model, with the batch size it is specialized to, if any. Raises Uncodable."""
    try:
        return _encoded(traced, fixed_rows)
    except (Broken, ValueError) as exc:
        raise Uncodable(str(exc)) from exc


def _encoded(traced: Traced, fixed_rows: int | None) -> bytes:
    constants = {name: _tensor(tensor) for name, tensor in traced.constants.items()}
    used = set(traced.attributes.values())
    data: dict[str, Any] = {
        "format": FORMAT,
        "fixed_rows": fixed_rows,
        "graph": _graph(traced.graph, traced.root),
        "attributes": {str(node.target): name for node, name in traced.attributes.items()},
        "constants": {name: value for name, value in constants.items() if name in used},
        "outputs": [
            container_text.to_text(traced.outputs.spec),
            [[place, argument(value, {})] for place, value in traced.outputs.constants.items()],
            list(traced.outputs.positions),
            list(traced.outputs.host),
        ],
        "changes": list(traced.changes),
        "record": list(traced.record),
        "holes": list(traced.holes),
        "whole": list(traced.whole),
        "decisions": None if traced.decisions is None else _decisions(traced.decisions),
        "leaves": None if traced.leaves is None else {n: _leaf_call(c) for n, c in traced.leaves.calls.items()},
    }
    check_trace(data)
    check_sound(traced)
    plain = msgspec.msgpack.encode(data)
    held = sum(len(raw) for _, _, raw, _ in data["constants"].values())
    if held > MOST_CONSTANT_BYTES or len(plain) - held > MOST_GRAPH_BYTES:
        raise Uncodable(f"constants of {held} bytes, and {len(plain) - held} for the rest")
    return zlib.compress(plain, 1)


def decode(
    data: bytes, model: nn.Module, lengths: Mapping[sympy.Symbol, int] | None = None
) -> tuple[Traced, int | None]:
    """Deserialize a traced model that reads the tensors of `model`; also returns its fixed batch size, if any.

    `lengths` are substituted for the symbols of dynamic dimensions (tracing/dynamic_shapes.py). Raises Broken.
    """
    try:
        return _decoded(_checked(data), model, lengths or {})
    except Broken:
        raise
    except Exception as exc:
        raise Broken(f"{type(exc).__name__}: {exc}") from exc


class _Fields(msgspec.Struct):
    """A trace whose constants are read, while the size of the rest is not known yet."""

    constants: dict[str, tuple[str, Annotated[list[int], Meta(max_length=MOST_DIMENSIONS)], bytes, str]]


def _checked(data: bytes) -> dict[str, Any]:
    """Decompress and read a trace, and check what it contains."""
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(data, MOST_CONSTANT_BYTES + MOST_GRAPH_BYTES)
    if not unpacker.eof:
        raise Broken(f"it is cut off, or has more than {MOST_CONSTANT_BYTES + MOST_GRAPH_BYTES} bytes")
    constants = msgspec.msgpack.decode(plain, type=_Fields).constants
    if len(plain) - sum(len(raw) for _, _, raw, _ in constants.values()) > MOST_GRAPH_BYTES:
        raise Broken(f"it has more than {MOST_GRAPH_BYTES} bytes beside the values of its constants")
    found: dict[str, Any] = msgspec.msgpack.decode(plain)
    check_trace(found)
    return found


def _decoded(data: dict[str, Any], model: nn.Module, lengths: Mapping[sympy.Symbol, int]) -> tuple[Traced, int | None]:
    if data["format"] != FORMAT:
        raise Broken(f"written in format {data['format']}, not {FORMAT}")
    table = None
    if data["leaves"] is not None:
        table = LeafTable(model, {name: _to_leaf_call(call) for name, call in data["leaves"].items()})
    state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state.update(model.named_buffers(remove_duplicate=False))
    constants = {name: _to_tensor(value) for name, value in data["constants"].items()}
    root = nn.Module()
    for target, name in data["attributes"].items():
        _assign(root, target, constants[name] if name in constants else state[name])
    graph = _to_graph(data["graph"], root, table, lengths)
    attributes = {
        node: data["attributes"][node.target]
        for node in graph.nodes
        if node.op == "get_attr" and node.target in data["attributes"]
    }
    spec, fixed, positions, host = data["outputs"]
    outputs = OutputSpec(
        container_text.from_text(spec),
        {place: to_argument(value, []) for place, value in fixed},
        tuple(positions),
        tuple(host),
    )
    decisions = None if data["decisions"] is None else _to_decisions(data["decisions"])
    changes, record = tuple(data["changes"]), tuple(data["record"])
    traced = Traced(
        graph,
        root,
        outputs,
        attributes,
        constants,
        changes,
        record,
        table,
        tuple(data["holes"]),
        decisions,
        tuple(data["whole"]),
    )
    check_sound(traced)
    return traced, data["fixed_rows"]


def _decisions(decisions: Decisions) -> list[Any]:
    module = decisions.module
    tensors = {
        str(node.target): _tensor(attribute(module, str(node.target)))
        for node in module.graph.nodes
        if node.op == "get_attr" and isinstance(attribute(module, str(node.target)), torch.Tensor)
    }
    return [_graph(module.graph, module), tensors, list(decisions.values), list(decisions.modules)]


def _to_decisions(data: list[Any]) -> Decisions:
    graph, tensors, values, modules = data
    root = nn.Module()
    for target, tensor in tensors.items():
        _assign(root, target, _to_tensor(tensor))
    module = graph_module(root, _to_graph(graph, root, None, {}), "Decisions")
    return Decisions(module, tuple(values), tuple(modules))


# -- graphs -------------------------------------------------------------------------------------------------------


def _graph(graph: Graph, root: nn.Module) -> dict[str, Any]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    values: dict[Any, int] = {}
    inner: dict[str, Any] = {}
    nodes = []
    for node in graph.nodes:
        value = values.setdefault(node.meta.get("val"), len(values))
        target: Any = node.target
        args: Any = node.args
        if node.op == "call_function":
            target = _target(target)
            if target[1] == LEAF:
                args = (call_name(args[0]), *args[1:])
        elif node.op == "get_attr":
            module = attribute(root, str(target))
            if isinstance(module, GraphModule):
                inner[str(target)] = _graph(module.graph, module)
            elif not isinstance(module, torch.Tensor):
                raise Uncodable(f"attribute {target} is a {type(module).__qualname__}")
        elif node.op in ("placeholder", "output"):
            target = node.op
        else:
            raise Uncodable(f"a node of kind {node.op}")
        kwargs = argument(node.kwargs, numbers) if node.kwargs else None
        told = (node.meta.get("module", ""), node.meta.get("line", ""))
        nodes.append([node.op, node.name, target, argument(args, numbers), kwargs, value, *told])
    return {"nodes": nodes, "values": [value_data(value) for value in values], "inner": inner}


def _to_graph(
    data: dict[str, Any], root: nn.Module, table: LeafTable | None, lengths: Mapping[sympy.Symbol, int]
) -> Graph:
    for target, inner in data["inner"].items():
        holder = nn.Module()
        _assign(root, target, graph_module(holder, _to_graph(inner, holder, table, lengths)))
    values = [to_value(value) for value in data["values"]]
    if lengths:
        values = [with_lengths(value, lengths) for value in values]
    graph = Graph()
    nodes: list[Node] = []
    targets: dict[tuple[str, ...], Any] = {}
    for op, name, target, args, kwargs, value, module, source in data["nodes"]:
        given = to_argument(args, nodes)
        if op == "call_function":
            key = tuple(target)
            if key not in targets:
                targets[key] = _to_target(key)
            if target[1] == LEAF:
                if table is None:
                    raise Broken("a leaf without a table")
                given = (table.key(given[0]), *given[1:])
            target = targets[key]
        node = graph.create_node(op, target, given, to_argument(kwargs, nodes) if kwargs else {}, name=name)
        if op == "placeholder":
            node.target = node.name  # torch.fx writes it into the code as it is; the name is one of its own by now
        node.meta = {"val": values[value], "module": module, "line": source}
        nodes.append(node)
    return graph


def _assign(root: nn.Module, target: str, value: Any) -> None:
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            setattr(root, part, nn.Module())
        root = getattr(root, part)
        if type(root) is not nn.Module:
            raise Broken(f"a path through a {type(root).__qualname__}: {target}")
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def _target(target: Callable[..., Any]) -> list[str]:
    if isinstance(target, torch._ops.OpOverload):
        check_operator(target)
        return ["op", target._schema.name, target._overloadname]
    if isinstance(target, torch._ops.HigherOrderOperator):
        found = ["hop", target.name(), ""]
    else:
        found = ["py", str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))]
    try:
        same = _to_target(tuple(found)) is target
    except (Broken, AttributeError):
        same = False
    if not same:
        raise Uncodable(f"a call of {target!r}")
    return found


def _to_target(target: tuple[str, ...]) -> Any:
    """Look up a function whose name the grammar allows."""
    kind, where, name = target
    if kind == "op":
        namespace, base = where.split("::")
        found = getattr(getattr(getattr(torch.ops, namespace), base), name)
        check_operator(found)
        return found
    if kind == "hop":
        found = getattr(torch.ops.higher_order, where)
        if not isinstance(found, torch._ops.HigherOrderOperator):
            raise Broken(f"{where} is no operator")
        return found
    if name not in FUNCTIONS.get(where, ()):
        raise Broken(f"a call of {where}.{name}")
    return getattr(_PYTHON[where], name)


# -- constants and leaves -----------------------------------------------------------------------------------------


def _tensor(tensor: torch.Tensor) -> list[Any]:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise Uncodable(f"a constant of type {type(tensor).__qualname__} {tensor.layout} on {tensor.device}")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw, tensor.device.type]


def _to_tensor(data: list[Any]) -> torch.Tensor:
    dtype = DTYPES[data[0]]
    if not data[2]:
        return torch.empty(data[1], dtype=dtype, device=data[3])
    return torch.frombuffer(bytearray(data[2]), dtype=torch.uint8).view(dtype).reshape(data[1]).to(data[3])


def _leaf_call(call: LeafCall) -> list[Any]:
    if is_function(call.path) and not found_by_name(call.path):
        raise Uncodable(f"{function_name(call.path)} is defined inside a function, where no other run finds it")
    made = [
        [
            str(each.dtype).removeprefix("torch."),
            [None if size is None else expression(size) for size in each.shape],
            each.requires_grad,
        ]
        for each in call.made
    ]
    return [
        call.path, container_text.to_text(call.spec), list(call.tensors), list(call.written), list(call.numbers),
        [[place, argument(value, {})] for place, value in call.constants], made, container_text.to_text(call.result),
        list(call.places), [[place, argument(value, {})] for place, value in call.result_constants], call.shares,
    ]  # fmt: skip


def _to_leaf_call(data: list[Any]) -> LeafCall:
    path, spec, tensors, written, numbers, constants, made, result, places, fixed, shares = data
    return LeafCall(
        path,
        container_text.from_text(spec),
        tuple(tensors),
        tuple(written),
        tuple(numbers),
        tuple((place, to_argument(value, [])) for place, value in constants),
        tuple(
            LeafOutput(
                DTYPES[dtype],
                tuple(s if s is None or type(s) is int else to_expression(s) for s in shape),
                requires_grad,
            )
            for dtype, shape, requires_grad in made
        ),
        container_text.from_text(result),
        tuple(places),
        tuple((place, to_argument(value, [])) for place, value in fixed),
        shares,
    )
