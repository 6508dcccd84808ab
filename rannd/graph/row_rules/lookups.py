"""Operators that look up in tables."""

from __future__ import annotations

from rannd.graph.row_rules.operation import Operation, rule, together
from rannd.graph.row_states import FIXED, WHOLE, Coupled, RowIndex, Rows, State


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
    """(bags, ...): all bags are of one size, and each of the samples has one."""
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
    """Places in a fixed row of numbers, or in a row of numbers of each sample."""
    op.fixed("sorter")
    name = "sorted_sequence"
    rows = op.rows("self")
    if op.state(op.args[name]) is FIXED and len(op.shape(op.args[name])) == 1 and rows is not None:
        return rows
    rows = together(op, name, "self")
    if rows.dim == len(op.out) - 1:
        raise Coupled("searchsorted works across the samples")
    return rows


@rule("bucketize")
def bucketize(op: Operation) -> State:
    op.fixed("boundaries")
    rows = op.rows("self")
    assert rows is not None
    return rows
