"""Rules of operators that take indices: tensor[i, j, ...], index_put, embeddings, searchsorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from rannd.graph.rows.rules.operation import Operation, rule, together
from rannd.graph.rows.rules.states import FIXED, WHOLE, Coupled, RowIndex, Rows, State


@dataclass(frozen=True)
class _Places:
    """Dimensions of tensor[indices]: those of the broadcast indices are adjacent, at `start`."""

    used: tuple[int, ...]
    """Indexed dimensions of the tensor."""
    width: int
    """Number of dimensions of the broadcast indices."""
    start: int

    def outside(self, dim: int) -> int:
        """Position of a dimension without index in the result."""
        before = sum(other not in self.used for other in range(dim))
        return before + (self.width if before >= self.start else 0)


def _places(op: Operation, indices: list[Any]) -> _Places:
    used = tuple(dim for dim, value in enumerate(indices) if value is not None)
    if not used or any(_is_mask(indices[dim]) for dim in used):
        raise Coupled(f"{op.name} with a mask is not supported")
    together = used == tuple(range(used[0], used[0] + len(used)))
    return _Places(used, max(len(op.shape(indices[dim])) for dim in used), used[0] if together else 0)


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _looked_up(op: Operation, indices: list[Any]) -> Rows:
    """State of tensor[indices]; Coupled unless it indexes a fixed table or within each sample."""
    places = _places(op, indices)
    states = {dim: op.state(indices[dim]) for dim in places.used}
    rows = op.rows("self")
    if rows is not None and rows.dim not in places.used:
        if any(state is not FIXED for state in states.values()):
            raise Coupled(f"{op.name} combines different samples")
        return Rows(places.outside(rows.dim), rows.outer, rows.inner)
    found: set[tuple[int, int, int]] = set()
    for dim, state in states.items():
        ndim = len(op.shape(indices[dim]))
        if isinstance(state, RowIndex):
            if rows is None or dim != rows.dim or (rows.outer, rows.inner, state.step) != (1, 1, 1):
                raise Coupled(f"{op.name} uses the position of a sample in the batch")
            found.add((ndim - state.dim, 1, 1))
        elif isinstance(state, Rows):
            found.add((ndim - state.dim, state.outer, state.inner))
        elif state is not FIXED:
            raise Coupled(f"{op.name} has an index computed from all samples")
        if rows is not None and dim == rows.dim and not isinstance(state, RowIndex):
            raise Coupled(f"{op.name} picks samples")
    if len(found) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((right, outer, inner),) = found
    for dim, state in states.items():
        shape = op.shape(indices[dim])
        if state is FIXED and len(shape) >= right and shape[-right] != 1:
            raise Coupled(f"{op.name} combines different samples")
    return Rows(places.start + places.width - right, outer, inner)


@rule("index", "_unsafe_index")
def index(op: Operation) -> State:
    """Indexes a fixed table, or within each sample."""
    return _looked_up(op, list(op.args["indices"]))


@rule("index_put", "index_put_", "_unsafe_index_put")
def index_put(op: Operation) -> State:
    """Writes within each sample, at positions that are shared or the sample's own."""
    rows = op.rows("self")
    if rows is None:
        raise Coupled(f"{op.name} writes samples into a fixed tensor")
    indices, values = list(op.args["indices"]), op.args["values"]
    ndim = len(op.shape(op.args["self"]))
    if len(indices) == 1 and indices[0] is not None and _is_mask(indices[0]):
        return _masked(op, rows, indices[0], values)
    target = _looked_up(op, indices)
    places = _places(op, indices)
    right = ndim - len(places.used) + places.width - target.dim
    shape, state = op.shape(values), op.as_rows(values)
    if state is None:
        if len(shape) >= right and shape[-right] != 1:
            raise Coupled(f"{op.name} combines samples with a fixed tensor of the batch size")
    elif (len(shape) - state.dim, state.outer, state.inner) != (right, target.outer, target.inner):
        raise Coupled(f"{op.name} combines different samples")
    return rows


def _masked(op: Operation, rows: Rows, mask: Node, values: Node) -> State:
    """Writes a fixed value where a mask is true; it may vary only over dimensions that the mask lacks."""
    behind = len(op.shape(op.args["self"])) - len(op.shape(mask))
    shape = op.shape(values)
    single = all(size == 1 for size in shape[: max(len(shape) - behind, 0)])
    if op.as_rows(mask) != rows or op.state(values) is not FIXED or not single:
        raise Coupled(f"{op.name} with a mask is not supported")
    return rows


@rule("embedding")
def embedding(op: Operation) -> State:
    op.fixed("weight")
    if op.args.get("scale_grad_by_freq"):
        raise Coupled("embedding scales its gradient by how often an index is in the batch")
    rows = op.rows("indices")
    assert rows is not None
    return rows


@rule("one_hot")
def one_hot(op: Operation) -> State:
    if not isinstance(op.args.get("num_classes"), int) or op.args["num_classes"] < 0:
        raise Coupled("one_hot takes the number of classes from the samples")
    rows = op.rows("self")
    assert rows is not None
    return rows


@rule("embedding_bag")
def embedding_bag(op: Operation) -> State:
    """One bag per sample, all of the same size: offsets are an arange with that step."""
    op.fixed("weight")
    if op.args.get("scale_grad_by_freq"):
        raise Coupled("embedding_bag scales its gradient by how often an index is in the batch")
    rows = op.rows("indices")
    weights = op.rows("per_sample_weights") if op.args.get("per_sample_weights") is not None else rows
    ends = op.args.get("include_last_offset")
    if rows is None or rows.outer != 1 or weights != rows or ends:
        raise Coupled("embedding_bag combines different samples")
    if op.state(op.args["offsets"]) != RowIndex(0, rows.inner):
        raise Coupled("embedding_bag has bags of different sizes")
    return (Rows(0, 1, 1), *(WHOLE,) * (len(op.node.meta["val"]) - 1))


@rule("searchsorted")
def searchsorted(op: Operation) -> State:
    """Searches a fixed sorted sequence, or one sequence per sample."""
    op.fixed("sorter")
    name = "sorted_sequence"
    rows = op.rows("self")
    if op.state(op.args[name]) is FIXED and len(op.shape(op.args[name])) == 1 and rows is not None:
        return rows
    rows = together(op, name, "self")
    if rows.dim == len(op.out) - 1:
        raise Coupled("searchsorted works along the batch dimension")
    return rows


@rule("bucketize")
def bucketize(op: Operation) -> State:
    op.fixed("boundaries")
    rows = op.rows("self")
    assert rows is not None
    return rows
