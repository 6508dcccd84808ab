"""Rules of mixture-of-experts routing: tokens sorted by expert, processed in groups, and put back in order.

The order of the tokens depends on all samples, but the final result does not: each token went through the expert that
it chose. The rules recognize this by tracking the sort that the order comes from, never by guessing:

    keys, order = sort(choices)          choices: one of E experts for each of rows x inner positions
    tokens[order]                        VALUES, in sorted order (tokens[order // k] if k positions share a token)
    ends = cumsum(histc(keys, E), 0)     where the group of each expert ends
    grouped_mm(values, weight, ends)     each position with the weight of its own choice
    inverse[order] = arange(positions)   the inverse permutation
    values[inverse]                      back in the original order
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from rannd.graph.fx.aliasing import base_name
from rannd.graph.fx.traced import arguments
from rannd.graph.rows.rules.operation import Operation, Rule, dims_of, leaves, rule
from rannd.graph.rows.rules.reductions import along_dims
from rannd.graph.rows.rules.states import FIXED, Arange, Coupled, Role, RowIndex, Rows, Sorted, State

SORTED_RULES: dict[str, Rule] = {}
"""Rules for operators with a `Sorted` argument; all other operators on such arguments couple the samples."""

EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that represent every expert index exactly."""


def sorted_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule in SORTED_RULES."""

    def register(function: Rule) -> Rule:
        for name in names:
            SORTED_RULES[name] = function
        return function

    return register


@rule("sort", "argsort")
def sort(op: Operation) -> State:
    """A sort of all positions of a 1-d tensor gives keys and order; any other one must be within each sample."""
    rows = op.rows("self")
    if rows is None or len(op.shape(op.args["self"])) != 1 or rows.outer != 1 or op.args.get("descending"):
        return along_dims(op)
    made = Sorted(op.node, rows.inner, Role.ORDER)
    return made if op.name == "argsort" else (replace(made, role=Role.KEYS), made)


def is_sorted(state: State) -> bool:
    """Whether operators on an argument with this state use SORTED_RULES."""
    return isinstance(state, Sorted)


def _role(op: Operation, value: Any, *roles: Role) -> Sorted:
    """State of a `Sorted` argument; Coupled unless it has one of the roles."""
    state = op.state(value)
    if not isinstance(state, Sorted) or state.role not in roles:
        raise Coupled(f"{op.name} mixes samples, which are sorted")
    return state


def _choices(op: Operation, by: Node) -> int | None:
    """Number of experts from which the sorted keys were chosen (by topk or argmax), None if unknown."""
    source = arguments(by)["self"]
    while base_name(source) in ("view", "reshape", "flatten", "to", "_to_copy", "contiguous", "clone", "detach"):
        source = arguments(source)["self"]
        if source.meta["val"].dtype not in EXACT:
            return None
    if source.target is operator.getitem:
        if source.args[1] != 1 or base_name(source.args[0]) != "topk":
            return None
        source = source.args[0]
    elif base_name(source) != "argmax":
        return None
    named = arguments(source)
    shape = op.shape(named["self"])
    return shape[named["dim"]] if named.get("dim") is not None else None


@sorted_rule("to", "_to_copy", "contiguous", "clone", "detach", "alias")
def convert(op: Operation) -> State:
    state = _role(op, op.args["self"], *Role)
    if state.role is not Role.VALUES and op.node.meta["val"].dtype not in EXACT:
        raise Coupled(f"{op.name} converts an order to a dtype that cannot hold it")
    return state


@sorted_rule("floor_divide", "div")
def divide(op: Operation) -> State:
    """order // k: token index of positions that share a token."""
    state, by = op.state(op.args["self"]), op.args["other"]
    if not isinstance(state, Sorted) or state.role is not Role.ORDER:
        return pointwise(op)
    rounds = op.name == "floor_divide" or op.args.get("rounding_mode") in ("floor", "trunc")
    if not rounds or type(by) is not int or by < 1 or state.inner % (state.share * by):
        raise Coupled(f"{op.name} of the order of samples is not supported")
    return replace(state, share=state.share * by)


@sorted_rule("index", "index_select")
def take(op: Operation) -> State:
    """Index by the order, by its inverse, or into a fixed table by the keys."""
    if op.name == "index_select":
        chosen, first = op.args["index"], op.args["dim"] == 0
    else:
        chosen, first = op.args["indices"][0], len(op.args["indices"]) == 1
    source = op.state(op.args["self"])
    if not first or chosen is None:
        raise Coupled(f"{op.name} mixes samples, which are sorted")
    state = _role(op, chosen, Role.ORDER, Role.INVERSE, Role.KEYS)
    if state.role is Role.KEYS and source is FIXED:
        return replace(state, role=Role.VALUES)
    if state.role is Role.ORDER and source == Rows(0, 1, state.inner // state.share):
        return replace(state, role=Role.VALUES, share=1)
    if state.role is Role.INVERSE and source == replace(state, role=Role.VALUES):
        return Rows(0, 1, state.inner)
    raise Coupled(f"{op.name} mixes samples, which are sorted")


@sorted_rule("histc")
def count(op: Operation) -> State:
    """Positions per expert; exact only if the bins are the integers 0 .. E-1."""
    state = _role(op, op.args["self"], Role.KEYS)
    bins = op.args["bins"]
    if bins < 2 or (op.args["min"], op.args["max"]) != (0, bins - 1) or _choices(op, state.by) != bins:
        raise Coupled("histc does not count the samples' choices exactly")
    return replace(state, role=Role.COUNTS)


@sorted_rule("cumsum")
def ends(op: Operation) -> State:
    state = _role(op, op.args["self"], Role.COUNTS)
    if op.node.meta["val"].dtype not in EXACT:
        raise Coupled("cumsum has a dtype that cannot hold all counts")
    return replace(state, role=Role.ENDS)


@sorted_rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(op: Operation) -> State:
    """Grouped matrix product, if the groups come from the same sort as the values."""
    names = ("input", "weight") if "weight" in op.args else ("self", "mat2")
    state, groups = _role(op, op.args[names[0]], Role.VALUES), _role(op, op.args["offs"], Role.ENDS)
    op.fixed(names[1], "bias")
    weight, many = op.shape(op.args[names[1]]), op.shape(op.args["offs"])
    if replace(groups, role=Role.VALUES) != state or len(weight) != 3 or weight[:1] != many:
        raise Coupled(f"{op.name} has groups of another order")
    return state


@sorted_rule("empty_like", "zeros_like")
def blank(op: Operation) -> State:
    return replace(_role(op, op.args["self"], Role.ORDER), role=Role.BLANK)


@sorted_rule("index_put", "index_put_")
def invert(op: Operation) -> State:
    """inverse[order] = 0, 1, 2 ...: writes all positions."""
    state = _role(op, op.args["self"], Role.BLANK)
    order = replace(state, role=Role.ORDER)
    places = {Arange(state.inner), RowIndex(0)} if state.inner == 1 else {Arange(state.inner)}
    given = [op.state(each) for each in op.args["indices"]]
    if given != [order] or op.state(op.args["values"]) not in places or op.args.get("accumulate") or state.share != 1:
        raise Coupled(f"{op.name} mixes samples, which are sorted")
    return replace(state, role=Role.INVERSE)


@sorted_rule("argsort")
def invert_by_sorting(op: Operation) -> State:
    """argsort of a permutation is its inverse."""
    state = _role(op, op.args["self"], Role.ORDER)
    if state.share != 1 or op.args.get("descending"):
        raise Coupled("argsort of the order of samples is not supported")
    return replace(state, role=Role.INVERSE)


@sorted_rule("unsqueeze", "chunk", "split", "split_with_sizes", "slice", "narrow", "select", "softmax", "sum", "mean",
             "amax", "glu")  # fmt: skip
def behind(op: Operation) -> State:
    """Works on dimensions other than 0, with no other argument that depends on the samples."""
    state = _role(op, op.args["self"], Role.VALUES)
    if op.name in ("slice", "narrow") and op.out == op.shape(op.args["self"]):
        return state
    ndim = len(op.shape(op.args["self"])) + (op.name == "unsqueeze")
    if ndim < 2 or 0 in dims_of(op.args.get("dim", 0), ndim):
        raise Coupled(f"{op.name} mixes samples, which are sorted")
    for value in op.args.values():
        if any(each is not op.args["self"] and op.state(each) is not FIXED for each in leaves(value)):
            raise Coupled(f"{op.name} mixes samples, which are sorted")
    made = op.node.meta["val"]
    return (state,) * len(made) if isinstance(made, tuple) else state


def pointwise(op: Operation) -> State:
    """Elementwise operator on sorted values, with fixed tensors that broadcast over the positions."""
    found: set[Sorted] = set()
    right: set[int] = set()
    tensors = [each for value in op.args.values() for each in leaves(value) if isinstance(each, Node)]
    for tensor in tensors:
        if op.state(tensor) is not FIXED:
            state = _role(op, tensor, Role.VALUES, Role.KEYS)
            if state.role is Role.KEYS and op.name.endswith("_") and not op.name.endswith("__"):
                raise Coupled(f"{op.name} changes what the samples are sorted by")
            found.add(replace(state, role=Role.VALUES))
            right.add(len(op.shape(tensor)))
    if len(found) != 1 or len(right) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((state,), (place,)) = found, right
    for tensor in tensors:
        shape = op.shape(tensor)
        if op.state(tensor) is FIXED and len(shape) >= place and shape[-place] != 1:
            raise Coupled(f"{op.name} combines samples with a fixed tensor of the batch size")
    if len(op.out) != place:
        raise Coupled(f"{op.name} combines different samples")
    return state
