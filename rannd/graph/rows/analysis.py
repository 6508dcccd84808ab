"""Propagate the batch dimension through the graph.

For every node: does it depend on the samples, and which dimension holds them? The rules (rules/) are conservative: an
operator without a matching rule counts as *coupling* the samples, and then each rank's mini-batch runs unsplit. That
is correct for any model; it only rules out microbatches.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, Node

from rannd.graph.call.signature import Signature
from rannd.graph.fx.aliasing import base_name, is_random, nested_graph
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.sizes import PROBE_ROWS, depends_on_rows, is_number, is_plain_tensor, multiple_of_rows, shape_at
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import Traced, arguments, operator_name
from rannd.graph.rows.global_reductions import has_early_denominator, masked_mean, reduces, reduction, scalar
from rannd.graph.rows.rules.elementwise import pointwise
from rannd.graph.rows.rules.loss_rules import CLASS_LOSSES
from rannd.graph.rows.rules.moe_routing import SORTED_RULES, is_sorted
from rannd.graph.rows.rules.moe_routing import pointwise as sorted_pointwise
from rannd.graph.rows.rules.operation import Operation
from rannd.graph.rows.rules.rule_table import RULES
from rannd.graph.rows.rules.states import (
    COUNT,
    FIXED,
    WHOLE,
    Arange,
    Coupled,
    Reduction,
    Role,
    RowIndex,
    Rows,
    Scalar,
    Sorted,
    State,
)
from rannd.graph.rows.walk import Walk, state_of

SIZES = ("size", "sizes", "shape", "repeats", "start", "end", "step", "length", "split_size", "split_sizes",
         "output_size")  # fmt: skip
"""Arguments that may be computed from the number of rows; `_check` validates the resulting shape."""

REGIONS = ("higher_order::wrap_with_set_grad_enabled", "higher_order::wrap_with_autocast")
"""Higher-order operators that run a subgraph once, with the arguments that follow it."""


@dataclass(frozen=True)
class RowAnalysis:
    """Result of the batch-dimension analysis: a state per node.

    `coupled` says which operator mixes samples (None: samples are independent). `weighted` lists operands,
    as (node, argument name), to be multiplied by the microbatch's share of the rows so that the sum they enter adds
    up over microbatches.
    """

    states: Mapping[Node, State]
    coupled: str | None
    weighted: tuple[tuple[Node, str], ...] = ()
    masked: tuple[Node, ...] = ()
    """Means whose denominator is known before the first microbatch runs: losses averaged over non-ignored labels, and
    sums divided by a number computed from the arguments alone."""
    squeezed: tuple[Node, ...] = ()
    """Squeeze nodes that would drop the batch dimension of a microbatch with one row."""


def analyse(traced: Traced, signature: Signature, early: Set[Node]) -> RowAnalysis:
    """Analyse a traced model; `early` nodes are computed from the inputs alone."""
    found = _analyse(Walk(early=early), traced, signature)
    if found.coupled is None:
        return found
    # Mini-batches run unsplit: a mean over labels has its own denominator, however the model uses it.
    whole = _analyse(Walk(early=early, whole=True), traced, signature)
    kept = tuple(site for site in whole.weighted if not _bends(whole, site[0]))
    return dataclasses.replace(whole, coupled=found.coupled, weighted=kept)


def _bends(analysis: RowAnalysis, node: Node) -> bool:
    """Whether a sum of terms is used nonlinearly; such uses need the rank's own, unweighted value."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in seen and user.op != "output":
                if not isinstance(analysis.states[user], Scalar):
                    return True
                seen.add(user)
                stack.append(user)
    return False


def _analyse(walk: Walk, traced: Traced, signature: Signature) -> RowAnalysis:
    inputs: list[State] = [Rows(0, 1, 1) if spec.batch else FIXED for spec in signature.tensors]
    _walk(walk, traced.graph, traced.root, inputs)
    if signature.fixed_rows is not None:
        walk.coupled = f"the graph is specialized to batch size {signature.fixed_rows}"
    for node in traced.results:
        state = walk.states[node]
        if isinstance(state, Scalar) and node.meta["val"].ndim:
            walk.couple(node, "an output other than a scalar is reduced over all samples")
            walk.states[node] = WHOLE
        if isinstance(state, (RowIndex, Arange, Sorted)) or (isinstance(state, Rows) and state.outer != 1):
            walk.couple(node, "an output does not have the samples in order")
        if state is WHOLE or isinstance(state, tuple) or state == Scalar(Reduction.OTHER):
            walk.couple(node, "an output depends on all samples in an unsupported way")
    return RowAnalysis(walk.states, walk.coupled, tuple(walk.weighted), tuple(walk.masked), tuple(walk.squeezed))


def _walk(walk: Walk, graph: Graph, root: nn.Module, inputs: Sequence[State]) -> tuple[State, ...]:
    """Compute the state of every node and return the states of the graph's outputs."""
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            walk.states[node] = next(given)
        elif node.op == "get_attr":
            walk.states[node] = FIXED
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
            return tuple(state_of(walk, result) for result in results)
        else:
            walk.states[node] = _result(walk, node, root)
    raise AssertionError("a graph without output")


def _result(walk: Walk, node: Node, root: nn.Module) -> State:
    value = node.meta.get("val")
    if is_number(value):
        return COUNT if depends_on_rows(value) else FIXED
    states = [walk.states[source] for source in node.all_input_nodes]
    if all(state is FIXED for state in states):
        if is_random(root, node):
            walk.couple(node, f"{operator_name(node.target)} draws random numbers that all samples share")
        return FIXED
    try:
        state = _follow(walk, node, states, root)
        if state is WHOLE:  # a possibly unused element of a tuple; its users are coupled
            return WHOLE
        _check(value, state)
    except Coupled as reason:
        walk.couple(node, str(reason))
        return WHOLE
    return state


def _follow(walk: Walk, node: Node, states: Sequence[State], root: nn.Module) -> State:
    """Compute the state of a node whose arguments depend on the samples; Coupled if it mixes them."""
    if node.target is operator.getitem:
        source = walk.states[node.args[0]]  # type: ignore[index]
        if not isinstance(source, tuple):
            raise Coupled("an element is taken of a value without a rule")
        return source[node.args[1]]  # type: ignore[index]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _nested(walk, node, root)
    if has_early_denominator(walk, node):
        walk.masked.append(node)
        return Scalar(Reduction.MEAN if walk.whole else Reduction.EXACT)
    if any(state is WHOLE or isinstance(state, tuple) for state in states) and not reduces(node):
        raise Coupled(f"{operator_name(node.target)} follows an op that mixes samples")
    if any(isinstance(state, Scalar) for state in states):
        return scalar(walk, node)
    return _apply(walk, node)


def _check(value: Any, state: State) -> None:
    """Raise Coupled if a state contradicts the shape of the value: a safety net under all rules.

    Only the dimension that holds the samples may depend on the number of rows, and it must be a multiple of it for
    every number of rows.
    """
    if isinstance(value, (tuple, list)):
        if not isinstance(state, tuple) or len(state) != len(value):
            raise Coupled("an operator has results without a rule")
        for each, own in zip(value, state, strict=True):
            if own is not WHOLE:  # users of a WHOLE element are coupled
                _check(each, own)
    elif isinstance(value, TensorValue):
        expected = [0] * value.ndim
        if isinstance(state, Rows) and 0 <= state.dim < value.ndim:
            expected[state.dim] = state.outer * state.inner
        elif isinstance(state, RowIndex) and 0 <= state.dim < value.ndim:
            expected[state.dim] = 1
        elif isinstance(state, Arange) or (isinstance(state, Sorted) and state.role not in (Role.COUNTS, Role.ENDS)):
            expected[:1] = [state.inner]
        elif not (state is FIXED or isinstance(state, (Scalar, Sorted))):
            raise Coupled("a result depends on the samples in an unsupported way")
        if [multiple_of_rows(size) for size in value.shape] != expected:
            raise Coupled("a shape depends on the batch size in an unsupported way")
    elif value is not None and state is not FIXED:
        raise Coupled("a Python number is computed from the samples")


def _apply(walk: Walk, node: Node) -> State:
    """Apply the operator's rule."""
    if operator_name(node.target) == LEAF:
        raise Coupled("a module that runs as one operator may mix samples")
    if not isinstance(node.target, torch._ops.OpOverload):
        raise Coupled(f"there is no rule for {operator_name(node.target)}")
    name = base_name(node)
    named = arguments(node)
    for key, argument in named.items():
        if key not in SIZES and any(state_of(walk, leaf) is COUNT for leaf in pytree.tree_leaves(argument)):
            raise Coupled(f"{operator_name(node.target)} computes with the batch size")
    operation = Operation(
        name,
        node,
        named,
        lambda value: state_of(walk, value),
        _probed,
    )
    rule = RULES.get(name)
    sorts = any(is_sorted(walk.states[source]) for source in node.all_input_nodes)
    if sorts:
        rule = SORTED_RULES.get(name, sorted_pointwise if rule is pointwise else None)
    if rule is None and torch.Tag.pointwise in node.target.tags:
        rule = sorted_pointwise if sorts else pointwise
    if rule is None:
        raise Coupled(f"there is no rule for {operator_name(node.target)}")
    try:
        state = rule(operation)
    except Coupled as reason:
        kind = reduction(node, named)
        if kind is None:
            raise
        walk.couple(node, str(reason))
        return Scalar(kind)
    if name in ("squeeze", "squeeze_") and _drops_a_single_row(walk, named):
        if walk.inside:
            raise Coupled(f"{name} drops the batch dimension if it has size 1")
        walk.squeezed.append(node)
    if state == Scalar(Reduction.MEAN) and name in CLASS_LOSSES:
        return masked_mean(walk, node, named)
    return state


def _drops_a_single_row(walk: Walk, named: Mapping[str, Any]) -> bool:
    """Whether a squeeze would remove the batch dimension if its size were 1."""
    source = named["self"]
    state = walk.states[source]
    if not isinstance(state, (Rows, RowIndex)) or (isinstance(state, Rows) and state.outer * state.inner != 1):
        return False
    dim = named.get("dim")
    ndim = source.meta["val"].ndim
    return dim is None or state.dim in {each % ndim for each in ([dim] if isinstance(dim, int) else dim)}


def _probed(value: Any) -> tuple[int, ...]:
    """Shape of a value for PROBE_ROWS rows; Coupled if it depends on tensor values."""
    if not isinstance(value, Node):
        return ()
    if not is_plain_tensor(value):
        raise Coupled("a size depends on the values of a tensor")
    return shape_at(value.meta["val"], PROBE_ROWS)


def _nested(walk: Walk, node: Node, root: nn.Module) -> State:
    """Analyse the subgraph of a no_grad or autocast region."""
    region = nested_graph(root, node) if operator_name(node.target) in REGIONS else None
    if region is None:
        raise Coupled(f"there is no rule for {operator_name(node.target)}")
    inner, given = region
    walk.inside += 1
    try:
        return _walk(walk, inner.graph, inner, [state_of(walk, argument) for argument in given])
    finally:
        walk.inside -= 1
