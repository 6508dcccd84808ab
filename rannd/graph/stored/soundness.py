"""What the parts of a trace have to say of each other, beyond the grammar of each; checked as it is written and read.

A trace that violates it would fail later, where it is planned or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from torch import nn
from torch.fx import Graph, GraphModule, Node

from rannd.graph.call.signature import Signature
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import LeafCall, LeafTable, call_of
from rannd.graph.fx.sizes import is_known, is_number, number_at, numel_at, shape_at
from rannd.graph.fx.symbolic_values import ROWS, Number, TensorValue
from rannd.graph.fx.traced import Traced, attribute, operator_name
from rannd.graph.modules.autograd_functions import is_function
from rannd.graph.modules.methods import Method, called_in_forward, is_own_method
from rannd.graph.stored.encoding import Broken

MOST_ROWS: Final = 2**12
"""Number of rows for which sizes are evaluated."""
MOST_BYTES: Final = 2**60
"""Bytes of a tensor with so many rows: more than any machine has, and far from what 64 bits count."""


def check_sound(traced: Traced) -> None:
    """Check a trace. Raises Broken."""
    try:
        _check_outputs(traced)
        if traced.leaves is not None:
            _check_leaves(traced.leaves)
        for node in _nodes(traced.graph, traced.root):
            _check_value(node.meta.get("val"))
            if node.op == "call_function" and operator_name(node.target) == LEAF:
                _check_leaf_node(node)
    except Broken:
        raise
    except Exception as exc:
        raise Broken(f"{type(exc).__name__}: {exc}") from exc


def check_inputs(traced: Traced, signature: Signature) -> None:
    """Check that a trace takes the tensors of a call. Raises Broken."""
    values = [node.meta["val"] for node in traced.placeholders]
    specs = signature.tensors
    if len(values) != len(specs) or not all(isinstance(value, TensorValue) for value in values):
        raise Broken(f"it is for {len(values)} tensors, not {len(specs)}")
    for value, spec in zip(values, specs, strict=True):
        if (value.dtype, value.shape[1 if spec.batch else 0 :]) != (spec.dtype, spec.shape):
            raise Broken(f"its {spec.name} is of the shape {value.shape} and {value.dtype}")


def _check_outputs(traced: Traced) -> None:
    outputs = traced.outputs
    if len(outputs.positions) != len(traced.results):
        raise Broken(f"it returns {len(traced.results)} values, not {len(outputs.positions)}")
    _check_places([*outputs.positions, *outputs.constants], outputs.spec.num_leaves)


def _check_leaves(table: LeafTable) -> None:
    called = called_in_forward(table.model)
    for call in table.calls.values():
        part = table.module(call.path)
        if isinstance(part, Method) and not (is_own_method(part.owner, part.name) and part.name in called):
            raise Broken(f"the method {call.path}, which no forward calls by its name")
        _check_call(part, call)


def _check_call(part: nn.Module, call: LeafCall) -> None:
    sources = [*call.tensors, *call.written]
    given = [source for source in sources if isinstance(source, int)]
    _check_places([*given, *call.numbers, *(place for place, _ in call.constants)], call.spec.num_leaves)
    _check_places([*call.places, *(place for place, _ in call.result_constants)], call.result.num_leaves)
    names = {*dict(part.named_parameters()), *dict(part.named_buffers())}
    if not is_function(call.path) and not {source for source in sources if isinstance(source, str)} <= names:
        raise Broken(f"{call.path} has no such tensors: {sources}")
    if len(call.made) != len(call.places):
        raise Broken(f"{call.path} returns {len(call.places)} tensors, not {len(call.made)}")
    for made in call.made:
        for size in made.shape:
            _check_linear(size)
        _check_value(made.value)


def _check_linear(size: Any) -> None:
    """Check a size that a leaf's result has: unknown, a number, or a multiple of the rows and a number."""
    if size is None or type(size) is int:
        return
    if size.free_symbols != {ROWS} or size != int(size.coeff(ROWS, 1)) * ROWS + int(size.coeff(ROWS, 0)):
        raise Broken(f"a leaf's result of the size {size}")


def _check_leaf_node(node: Node) -> None:
    key, tensors, written, numbers = node.args
    _, call = call_of(str(key))
    lengths = [len(each) for each in (tensors, written, numbers)]  # type: ignore[arg-type]
    if lengths != [len(call.tensors), len(call.written), 1 + len(call.numbers)]:
        raise Broken(f"a call of {call.path} with other arguments")


def _check_places(places: Sequence[int], count: int) -> None:
    """Check that each of the leaves of a container is given once."""
    if sorted(places) != list(range(count)):
        raise Broken(f"a container of {count} values, of which {sorted(places)} are given")


@lru_cache(maxsize=100_000)
def _check_value(value: Any) -> None:
    """Check that the sizes and numbers of a value are such as a computer has."""
    if isinstance(value, tuple):
        for each in value:
            _check_value(each)
    elif isinstance(value, Number):
        if is_number(value) and value.kind == "int" and abs(number_at(value, MOST_ROWS)) >= MOST_BYTES:
            raise Broken(f"a number that grows to {value.expr}")
    elif isinstance(value, TensorValue) and is_known(value):
        if min(shape_at(value, MOST_ROWS), default=0) < 0:
            raise Broken(f"a tensor of negative size: {value.shape}")
        if max(numel_at(value, rows) for rows in (1, 2, 3, MOST_ROWS)) * value.element_size() >= MOST_BYTES:
            raise Broken(f"a tensor of the size {value.shape}")


def _nodes(graph: Graph, root: nn.Module) -> Iterator[Node]:
    """The nodes of a graph and of those inside of it."""
    for node in graph.nodes:
        yield node
        if node.op == "get_attr" and isinstance(inner := attribute(root, str(node.target)), GraphModule):
            yield from _nodes(inner.graph, inner)
