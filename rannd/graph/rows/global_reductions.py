"""Scalars reduced over all samples: the kind of reduction, and which arithmetic keeps them additive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Node

from rannd.graph.fx.aliasing import base_name
from rannd.graph.fx.sizes import is_plain_tensor, multiple_of_rows
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import arguments, operator_name
from rannd.graph.rows.rules.states import COUNT, FIXED, WHOLE, Coupled, Reduction, Scalar, State
from rannd.graph.rows.walk import Walk, state_of

SCALAR_LINEAR = {"neg", "to", "_to_copy", "clone", "detach", "alias", "view", "reshape", "squeeze", "unsqueeze",
                 "contiguous", "lift_fresh_copy", "flatten", "ravel", "select", "slice", "expand", "permute", "t",
                 "transpose"}  # fmt: skip
"""Operators that keep the reduction state of a scalar."""


def reduces(node: Node) -> bool:
    """Whether a node is a sum, a mean or a loss, which reduces all samples whatever their layout."""
    return base_name(node) in ("sum", "mean") or base_name(node).endswith(
        ("_loss", "_entropy", "_with_logits", "kl_div")
    )


def reduction(node: Node, named: Mapping[str, Any]) -> Reduction | None:
    """Kind of full reduction that an operator performs, None if it does not reduce to a scalar."""
    result = node.meta.get("val")
    if not reduces(node) or not isinstance(result, TensorValue) or result.ndim:
        return None
    if base_name(node) in ("sum", "mean"):
        return Reduction.MEAN if base_name(node) == "mean" else Reduction.SUM
    return {1: Reduction.MEAN, 2: Reduction.SUM}.get(named.get("reduction", 1))


def masked_mean(walk: Walk, node: Node, named: Mapping[str, Any]) -> State:
    """State of a mean over non-ignored labels, whose denominator differs between microbatches."""
    target = named["target"]
    if target.meta["val"].is_floating_point():
        return Scalar(Reduction.MEAN)
    if target in walk.early and (named.get("weight") is None or classes_of(node) is not None):
        walk.masked.append(node)
        return Scalar(Reduction.MEAN if walk.whole else Reduction.EXACT)
    walk.couple(node, "a mean over labels has labels that the model itself computes, or a changing number of classes")
    return Scalar(Reduction.MEAN)


def classes_of(node: Node) -> int | None:
    """Number of classes of a classification loss, None if it is a dynamic dimension."""
    shape = arguments(node)["self"].meta["val"].shape
    size = shape[1 if len(shape) > 1 else 0]
    return size if isinstance(size, int) else None


def has_early_denominator(walk: Walk, node: Node) -> bool:
    """Whether a node divides a sum over all samples by a number computed from the arguments alone."""
    if base_name(node) != "div" or node in walk.early:
        return False
    named = arguments(node)
    sums, divisor = named["self"], named["other"]
    return (
        named.get("rounding_mode") is None
        and state_of(walk, sums) == Scalar(Reduction.SUM)
        and divisor in walk.early
        and (walk.states[divisor] is WHOLE or isinstance(walk.states[divisor], Scalar))
        and is_plain_tensor(divisor)
        and divisor.meta["val"].ndim == 0
    )


def scalar(walk: Walk, node: Node) -> State:
    """State of arithmetic on scalars reduced over all samples: linear operators keep them additive."""
    name = base_name(node)
    named = arguments(node)
    operands = {key: value for key, value in named.items() if key in ("self", "other", "tensors", "input")}
    for key, argument in named.items():
        if key not in operands and any(state_of(walk, leaf) is not FIXED for leaf in pytree.tree_leaves(argument)):
            raise Coupled(f"argument {key} of {operator_name(node.target)} depends on the samples")
    if name in SCALAR_LINEAR or name in ("sum", "mean"):
        source = node.all_input_nodes[0]
        if _rounds(source.meta["val"].dtype, node.meta["val"].dtype):
            raise Coupled(f"{operator_name(node.target)} rounds a scalar reduced over all samples")
        return walk.states[source]
    if name == "stack":
        kinds = {state_of(walk, item) for item in named["tensors"]}
        if len(kinds) == 1:
            return kinds.pop()
        raise Coupled("losses that need different weights are stacked")
    if name in ("add", "sub", "rsub"):
        return _sum(walk, node, operands)
    if name in ("mul", "div"):
        left, right = (state_of(walk, operands[key]) for key in ("self", "other"))
        if named.get("rounding_mode") is None:
            if isinstance(left, Scalar) and right is FIXED:
                return left
            if name == "mul" and isinstance(right, Scalar) and left is FIXED:
                return right
            if isinstance(left, Scalar) and right is COUNT and _linear(operands["other"]):
                if name == "div" and left.reduction is Reduction.SUM:
                    return Scalar(Reduction.MEAN)
                if name == "mul" and left.reduction is Reduction.MEAN:
                    return Scalar(Reduction.SUM)
    raise Coupled(f"{operator_name(node.target)} is not linear in a scalar reduced over all samples")


def _sum(walk: Walk, node: Node, operands: dict[str, Any]) -> State:
    """State of a sum of reduced scalars: terms of one kind keep it, different kinds are weighted before the sum."""
    states = {
        key: state_of(walk, value)
        for key, value in operands.items()
        if isinstance(value, Node) or value != 0  # Python's sum() starts with 0
    }
    kinds = set(states.values())
    if len(kinds) == 1:
        return kinds.pop()
    for state in states.values():
        if not (state is FIXED or isinstance(state, Scalar)) or state == Scalar(Reduction.OTHER):
            raise Coupled("a scalar reduced over all samples is added to individual samples")
    if kinds == {FIXED, Scalar(Reduction.MEAN)}:
        return Scalar(Reduction.MEAN)
    value = node.meta["val"]
    if walk.inside or not (value.is_floating_point() or value.is_complex()):
        raise Coupled("terms that need different weights are added where no weights can be inserted")
    for key, state in states.items():
        if state is FIXED or state == Scalar(Reduction.MEAN):
            walk.weighted.append((node, key))
    return Scalar(Reduction.EXACT)


def _rounds(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a dtype conversion changes values beyond floating-point precision."""
    if old.is_floating_point or old.is_complex:
        return not (new.is_floating_point or new.is_complex)
    return new == torch.bool


def _linear(value: Any) -> bool:
    """Whether a number is proportional to the number of rows."""
    return bool(multiple_of_rows(value.meta["val"]))
