"""Reuse one trace for calls with other sizes than the batch size (sequence length, image size): dynamic shapes.

The first call of a model is traced for its own sizes. If a later call differs in some dimensions, the model is
exported once more with these *open* (dynamic). The result is a template: substituting sizes gives the graph for a call
in a fraction of the time. A template has a symbol for every open dimension in addition to ROWS, and the conditions on
them from the model's code; sizes that violate these are traced on their own.
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
from rannd.graph.fx.symbolic_values import ROWS, TensorValue, length_symbol, unified
from rannd.graph.fx.traced import Traced
from rannd.graph.modules.source_location import Offence
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Broken, Uncodable, expression, to_expression
from rannd.graph.stored.size_grammar import Sizes
from rannd.graph.tracing.batch_dim import is_wide

SMALLEST = 3
"""Templates are not traced with smaller sizes: torch.export treats 0 and 1 differently, and code may subtract."""

MOST_CONDITIONS = 1_000
"""Of a template."""

LARGEST_CHECKED = 65
"""Conditions on rows and sizes together are evaluated for numbers of rows from two to below this."""


class NoTemplate(Exception):
    """The model cannot be traced with these dimensions open, or a template is not valid for a call."""


class _Stored(msgspec.Struct):
    traced: bytes
    lengths: list[tuple[int, int, str]]
    """(tensor, dimension after the batch dimension, symbol) of the open dimensions."""
    conditions: list[Any]
    """Sizes as size_grammar.Sizes allows them."""


def template(model: nn.Module, signature: Signature, leaves: list[torch.Tensor], device: torch.device) -> bytes:
    """Trace a model as on `device` for all sizes of the dimensions in ``signature.open``, and serialize it.

    NoTemplate on failure.

    The template has the branches that the model's code takes for the values in `leaves`.
    """
    # Imported lazily: runs that get their traces from the cache do not need the tracer.
    from rannd.graph.branches.data_dependent import Undecidable
    from rannd.graph.tracing.autocast_types import settle_types
    from rannd.graph.tracing.export import Notes, TracedCall, example_inputs, export, shown, traced_of

    signature, leaves = _enlarged(signature, leaves)
    examples = example_inputs(signature, leaves)
    notes = Notes()
    try:
        program = export(
            model,
            signature,
            examples,
            TracedCall(leaves if signature.rows(leaves) else examples),
            device=device,
            notes=notes,
        )
        if notes.chances:
            raise NoTemplate("the model's code branches on random numbers")
        symbols = _symbols(program, signature)
        found = shown(model, program, notes, device, symbols)
        traced = traced_of(model, found, device)
        shapes = _sizes(program, signature)
        opened = [
            (symbols[shapes[tensor][dim + signature.tensors[tensor].batch].node.expr], tensor, dim)
            for tensor, dim in signature.open
        ]
        settle_types(
            traced, signature, device, {name: signature.tensors[tensor].shape[dim] for name, tensor, dim in opened}
        )
        data = encode(traced, None)
        conditions = [expression(each) for each in _conditions(program, symbols)]
        _check_conditions(conditions)
    except (Uncodable, Broken, Undecidable, Offence, TraceError) as exc:
        raise NoTemplate(str(exc)) from exc
    except NoTemplate:
        raise
    except Exception as exc:
        raise NoTemplate(f"{type(exc).__name__}: {exc}") from exc
    lengths = [(tensor, dim, str(name)) for name, tensor, dim in opened]
    return msgspec.msgpack.encode(_Stored(data, lengths, conditions))


def instance(data: bytes, model: nn.Module, signature: Signature) -> Traced:
    """Instantiate the graph for `signature` from a template. NoTemplate if the template is not valid for its sizes.

    Raises Broken for data that is not a template of this model.
    """
    try:
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise Broken(str(exc)) from exc
    _check_conditions(stored.conditions)
    sizes: dict[sympy.Symbol, int] = {}
    for tensor, dim, name in stored.lengths:
        if not (0 <= tensor < len(signature.tensors) and 0 <= dim < len(signature.tensors[tensor].shape)):
            raise Broken(f"it has an open dimension {dim} of tensor {tensor}, which the call does not have")
        size = signature.tensors[tensor].shape[dim]
        if sizes.setdefault(length_symbol(name), size) != size or size < 2:
            raise NoTemplate(f"dimension {dim + 1} of {signature.tensors[tensor].name} is {size}")
    for each in stored.conditions:
        try:
            condition = to_expression(each).subs(sizes)
            if not condition.free_symbols <= {ROWS}:
                raise Broken(f"it depends on {condition.free_symbols}")
            rows = range(2, LARGEST_CHECKED) if condition.free_symbols else (2,)
            fits = not any(condition.subs(ROWS, count) == sympy.false for count in rows)
        except Exception as exc:
            raise Broken(f"the condition {each}: {exc}") from exc
        if not fits:
            raise NoTemplate(f"the model's code runs differently for these sizes ({condition})")
    traced, _ = decode(stored.traced, model, sizes)
    if len(traced.placeholders) != len(signature.tensors):
        raise Broken(f"it is for {len(traced.placeholders)} tensors, not {len(signature.tensors)}")
    for node, spec in zip(traced.placeholders, signature.tensors, strict=True):
        value = node.meta["val"]
        if not isinstance(value, TensorValue) or value.shape[1 if spec.batch else 0 :] != spec.shape:
            raise NoTemplate(f"{spec.name} has the shape {spec.shape}")
    return dataclasses.replace(traced, record=())


def _check_conditions(conditions: list[Any]) -> None:
    """Raise Broken unless they are few, and small."""
    if len(conditions) > MOST_CONDITIONS:
        raise Broken(f"it has {len(conditions)} conditions on sizes")
    sizes = Sizes()
    for each in conditions:
        sizes.check(each)


def _enlarged(signature: Signature, leaves: list[torch.Tensor]) -> tuple[Signature, list[torch.Tensor]]:
    """The call with larger sizes in its open dimensions, where these are small; their differences stay the same.

    Values are repeated: only branches depend on them, and whoever uses a template checks those.
    """
    sizes = [signature.tensors[tensor].shape[dim] for tensor, dim in signature.open]
    if not all(sizes):
        raise NoTemplate("a dimension is 0")
    if min(sizes) >= SMALLEST:
        return signature, leaves
    tensors, leaves = list(signature.tensors), list(leaves)
    for tensor, dim in signature.open:
        spec = tensors[tensor]
        size = spec.shape[dim]
        where = torch.arange(size + SMALLEST, device=leaves[tensor].device) % size
        leaf = leaves[tensor].detach().index_select(dim + spec.batch, where)
        leaves[tensor] = leaf.requires_grad_(spec.requires_grad)
        shape = (*spec.shape[:dim], size + SMALLEST, *spec.shape[dim + 1 :])
        tensors[tensor] = dataclasses.replace(spec, shape=shape)
    return dataclasses.replace(signature, tensors=tuple(tensors)), leaves


def _sizes(program: Any, signature: Signature) -> list[Any]:
    """Shape of each placeholder."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [
        nodes[name].meta["val"].shape if isinstance(name, str) else ()
        for _, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True)
    ]


def _symbols(program: Any, signature: Signature) -> dict[sympy.Symbol, sympy.Symbol]:
    """Map the symbols of the exported program to ours. NoTemplate if an open dimension is not dynamic in it."""
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
    """Whether all sizes from two on are allowed."""
    bounds = [program.range_constraints.get(symbol) for symbol in size.node.expr.free_symbols]
    return all(each is None or (each.lower <= 2 and is_wide(each.upper)) for each in bounds)


def _conditions(program: Any, symbols: dict[sympy.Symbol, sympy.Symbol]) -> list[Any]:
    """Conditions on the sizes, in our symbols. NoTemplate for conditions on the batch size alone."""
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
                raise NoTemplate("the conditions of the exported program cannot hold")
        elif not condition.free_symbols & set(symbols.values()):
            if any(condition.subs(ROWS, rows) == sympy.false for rows in range(3, LARGEST_CHECKED)):
                raise NoTemplate(f"the model's code runs differently for some batch sizes ({condition})")
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
