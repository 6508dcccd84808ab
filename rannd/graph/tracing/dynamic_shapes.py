"""One trace for calls whose dimensions beside the batch change, too (the length of a sequence, the size of an image).

The first call of a model is traced for its own sizes. Where a later one differs in some dimensions, the model is
exported once more with those *open*; the result is a template, from which the graph for any sizes is made by putting
them in, in a fraction of the time. A template has, beside ROWS, a symbol for every open dimension, and the conditions
on them that the model's code made; sizes for which they do not hold are traced on their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import sympy
import torch
from torch import nn

from rannd.errors import TraceError
from rannd.graph.call.signature import Signature
from rannd.graph.fx.codec import decode, encode
from rannd.graph.fx.encoding import Broken, Uncodable, expression, to_expression
from rannd.graph.fx.symbolic_values import ROWS, TensorValue, length_symbol, unified
from rannd.graph.fx.traced import Traced
from rannd.graph.modules.source_location import Offence
from rannd.graph.tracing.batch_dim import MOST_ROWS

LARGEST_CHECKED = 65
"""Conditions on rows and sizes together are tried for fewer rows than this; fewer than two are not, as in batch.py."""


class NoTemplate(Exception):
    """The model cannot be traced with these dimensions open."""


class _Stored(msgspec.Struct):
    traced: bytes
    lengths: list[tuple[int, int, str]]
    """(tensor, dimension behind the batch, symbol) of the open dimensions."""
    conditions: list[Any]


def template(model: nn.Module, signature: Signature, leaves: list[torch.Tensor]) -> bytes:
    """A trace for all sizes of the dimensions in ``signature.open``, as data. NoTemplate where there is none."""
    # What traces is not imported where traces come from the cache.
    from rannd.graph.branches.data_dependent import Undecidable
    from rannd.graph.tracing.export import Notes, TracedCall, example_inputs, export, shown, traced_of

    examples = example_inputs(signature, leaves)
    notes = Notes()
    try:
        program = export(model, signature, examples, TracedCall(examples), notes=notes)
        if notes.decided or notes.chances:
            raise NoTemplate("branches depend on what is in the tensors")
        symbols = _symbols(program, signature)
        found = shown(model, program, notes, symbols)
        traced = traced_of(model, found)
        data = encode(traced, None)
        conditions = [expression(each) for each in _conditions(program, symbols)]
    except (Uncodable, Undecidable, Offence, TraceError) as exc:
        raise NoTemplate(str(exc)) from exc
    except NoTemplate:
        raise
    except Exception as exc:
        raise NoTemplate(f"{type(exc).__name__}: {exc}") from exc
    shapes = _sizes(program, signature)
    lengths = [
        (tensor, dim, str(symbols[shapes[tensor][dim + signature.tensors[tensor].batch].node.expr]))
        for tensor, dim in signature.open
    ]
    return msgspec.msgpack.encode(_Stored(data, lengths, conditions))


def instance(data: bytes, model: nn.Module, signature: Signature) -> Traced:
    """The graph of calls with `signature` out of a template. NoTemplate where the template is not for them.

    Raises Broken for data that is no template of this model.
    """
    try:
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except msgspec.MsgspecError as exc:
        raise Broken(str(exc)) from exc
    sizes: dict[sympy.Symbol, int] = {}
    for tensor, dim, name in stored.lengths:
        if not (0 <= tensor < len(signature.tensors) and 0 <= dim < len(signature.tensors[tensor].shape)):
            raise Broken(f"it is for dimension {dim} of tensor {tensor}, which there is none of")
        size = signature.tensors[tensor].shape[dim]
        if sizes.setdefault(length_symbol(name), size) != size or size < 2:
            raise NoTemplate(f"dimension {dim + 1} of {signature.tensors[tensor].name} is {size}")
    for each in stored.conditions:
        try:
            condition = to_expression(each).subs(sizes)
        except Exception as exc:
            raise Broken(f"the condition {each}: {exc}") from exc
        rows = range(2, LARGEST_CHECKED) if condition.free_symbols else (2,)
        if any(condition.subs(ROWS, count) == sympy.false for count in rows):
            raise NoTemplate(f"the model's code treats these sizes in another way ({condition})")
    traced, _ = decode(stored.traced, model, sizes)
    for node, spec in zip(traced.placeholders, signature.tensors, strict=True):
        value = node.meta["val"]
        if not isinstance(value, TensorValue) or value.shape[1 if spec.batch else 0 :] != spec.shape:
            raise NoTemplate(f"{spec.name} has the shape {spec.shape}")
    return dataclasses.replace(traced, record=())


def _sizes(program: Any, signature: Signature) -> list[Any]:
    """Shape of each placeholder."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [
        nodes[name].meta["val"].shape if isinstance(name, str) else ()
        for _, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True)
    ]


def _symbols(program: Any, signature: Signature) -> dict[sympy.Symbol, sympy.Symbol]:
    """The symbols of open dimensions, by those that tracing gave them. NoTemplate where one is not left open."""
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    shapes = _sizes(program, signature)
    for spec, shape in zip(signature.tensors, shapes, strict=True):
        if spec.batch and not (isinstance(shape[0], torch.SymInt) and _wide(program, shape[0])):
            raise NoTemplate(f"the batch dimension of {spec.name} is fixed")
    batch = {shape[0].node.expr for spec, shape in zip(signature.tensors, shapes, strict=True) if spec.batch}
    for tensor, dim in signature.open:
        spec = signature.tensors[tensor]
        size = shapes[tensor][dim + spec.batch]
        if not isinstance(size, torch.SymInt) or not isinstance(size.node.expr, sympy.Symbol):
            raise NoTemplate(f"dimension {dim + 1} of {spec.name} is fixed by the model's code")
        if size.node.expr in batch:
            raise NoTemplate(f"dimension {dim + 1} of {spec.name} is always as large as the batch")
        found.setdefault(size.node.expr, length_symbol(f"n{len(found)}"))
    return found


def _wide(program: Any, size: torch.SymInt) -> bool:
    """Whether a size may be anything from two on."""
    bounds = [program.range_constraints.get(symbol) for symbol in size.node.expr.free_symbols]
    return all(each is None or (each.lower <= 2 and each.upper >= MOST_ROWS) for each in bounds)


def _conditions(program: Any, symbols: dict[sympy.Symbol, sympy.Symbol]) -> list[Any]:
    """What has to hold for the sizes, in our symbols. NoTemplate where the batch alone has to be something."""
    found: list[Any] = []
    shape_env = next(
        value.fake_mode.shape_env
        for node in program.graph.nodes
        if node.op == "placeholder" and hasattr(value := node.meta.get("val"), "fake_mode")
    )
    for guard in shape_env.guards:
        condition = unified(shape_env.replace(guard.expr), symbols)
        if condition in (sympy.true, sympy.false):
            if condition == sympy.false:
                raise NoTemplate("conditions that cannot hold")
        elif not condition.free_symbols & set(symbols.values()):
            if any(condition.subs(ROWS, rows) == sympy.false for rows in range(3, LARGEST_CHECKED)):
                raise NoTemplate(f"the model's code treats some sizes of the batch in another way ({condition})")
        else:
            found.append(condition)
    for symbol, ours in symbols.items():
        bounds = program.range_constraints.get(symbol)
        if bounds is not None:
            if bounds.lower.is_Integer:
                found.append(sympy.Ge(ours, bounds.lower, evaluate=False))
            if getattr(bounds.upper, "is_Integer", False):
                found.append(sympy.Le(ours, bounds.upper))
    return [each for each in found if each not in (sympy.true, sympy.false)]
