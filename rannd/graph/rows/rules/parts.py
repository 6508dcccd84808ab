"""Rules of operators that slice, split, concatenate, repeat or pad tensors.

If dimension `dim` holds the samples as outer x rows x inner, slices that are whole blocks of rows x inner hold all
samples again, so tensors concatenated along the batch (e.g. two views of each image) can be split again.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from rannd.graph.fx.sizes import multiple_of_rows
from rannd.graph.rows.rules.operation import Operation, away, filled, leaves, rule
from rannd.graph.rows.rules.states import FIXED, Coupled, RowIndex, Rows, State


def _blocks(op: Operation, size: Any, rows: Rows) -> int:
    """Number of blocks of rows x inner in a size; Coupled if it is not a multiple of them."""
    multiple = multiple_of_rows(size)
    if not multiple or multiple % rows.inner:
        raise Coupled(f"{op.name} takes some of the samples")
    return multiple // rows.inner


def _place(value: Any) -> Any:
    """The integer value of an argument, symbolic if it is a node."""
    return value.meta["val"] if hasattr(value, "meta") else value


@rule("select", "select_copy")
def select(op: Operation) -> State:
    """Select one index along a dimension, which is removed."""
    state = op.state(op.args["self"])
    dim = op.args["dim"] % len(op.shape(op.args["self"]))
    op.fixed("index")
    if isinstance(state, RowIndex):
        if state.dim == dim:
            raise Coupled(f"{op.name} takes some of the samples")
        return replace(state, dim=state.dim - (dim < state.dim))
    rows = away(op, "self", {dim})
    return replace(rows, dim=rows.dim - (dim < rows.dim))


@rule("slice", "narrow", "slice_copy")
def cut_out(op: Operation) -> State:
    """Slice one dimension; the batch dimension only into whole blocks."""
    shape = op.shape(op.args["self"])
    dim = op.args["dim"] % len(shape)
    state = op.state(op.args["self"])
    if shape == op.out:
        return state
    if isinstance(state, RowIndex):
        if state.dim == dim:
            raise Coupled(f"{op.name} takes some of the samples")
        return state
    rows = op.rows("self")
    assert rows is not None
    if rows.dim == dim and op.args.get("step", 1) == 1:
        start = op.args.get("start")
        if start is not None and start != 0:
            _blocks(op, _place(start), rows)
        return replace(rows, outer=_blocks(op, op.node.meta["val"].shape[dim], rows))
    op.fixed("start", "end", "length")
    return away(op, "self", {dim})


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(op: Operation) -> State:
    """Split one dimension; the batch dimension only into whole blocks."""
    rows = op.rows("self")
    assert rows is not None
    parts = op.node.meta["val"]
    dim = op.args.get("dim", 0) % len(op.shape(op.args["self"]))
    if rows.dim != dim:
        return (rows,) * len(parts)
    return tuple(replace(rows, outer=_blocks(op, part.shape[dim], rows)) for part in parts)


@rule("unbind")
def unbind(op: Operation) -> State:
    dim = op.args.get("dim", 0) % len(op.shape(op.args["self"]))
    rows = away(op, "self", {dim})
    return (replace(rows, dim=rows.dim - (dim < rows.dim)),) * len(op.node.meta["val"])


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack", "column_stack")
def join(op: Operation) -> State:
    """Concatenate tensors with the same batch dimension; along the batch dimension they become consecutive blocks."""
    tensors = op.args["tensors"]
    parts = [tensor for tensor in tensors if prod(op.shape(tensor)) or len(op.shape(tensor)) != 1]
    states = {op.as_rows(tensor) for tensor in parts}
    places = {(rows.dim, rows.inner) for rows in states if rows is not None}
    if len(places) != 1 or None in states:
        raise Coupled(f"{op.name} combines different samples")
    ((place, inner),) = places
    outer = [rows.outer for tensor in parts if (rows := op.as_rows(tensor)) is not None]
    ndims = {len(op.shape(tensor)) for tensor in parts}
    stacks, dim = _joined_along(op, min(ndims))
    if stacks or dim != place:
        if len(set(outer)) != 1:
            raise Coupled(f"{op.name} combines different samples")
        return Rows(place + (stacks and dim <= place), outer[0], inner)
    return Rows(place, sum(outer), inner)


def _joined_along(op: Operation, ndim: int) -> tuple[bool, int]:
    """Return (whether a new dimension is inserted, its index)."""
    if op.name in ("hstack", "vstack", "column_stack"):
        new = ndim == 1 and op.name != "hstack"
        return new, int(op.name == "column_stack" or (op.name == "hstack" and ndim > 1))
    return op.name == "stack", op.args.get("dim", 0) % len(op.out)


@rule("repeat", "tile")
def repeat(op: Operation) -> State:
    """Repeat whole dimensions, which adds to `outer`."""
    shape, out = op.shape(op.args["self"]), op.out
    if op.state(op.args["self"]) is FIXED:
        return filled(out)
    rows = op.rows("self")
    assert rows is not None
    place = rows.dim + len(out) - len(shape)
    return Rows(place, rows.outer * (out[place] // shape[rows.dim]), rows.inner)


@rule("repeat_interleave")
def repeat_interleave(op: Operation) -> State:
    """Repeat each element, which adds to `inner`."""
    times, dim = op.args.get("repeats"), op.args.get("dim")
    if not isinstance(times, int) or dim is None:
        raise Coupled("repeat_interleave takes its repeats from a tensor")
    rows = op.rows("self")
    assert rows is not None
    return replace(rows, inner=rows.inner * times) if rows.dim == dim % len(op.out) else rows


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
      "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(op: Operation) -> State:
    values = leaves(op.args.get("pad", op.args.get("padding")))
    shape = op.shape(op.args["self"])
    padded = {len(shape) - 1 - place // 2 for place, value in enumerate(values) if value != 0}
    return away(op, "self", padded)
