"""Follow the samples of a batch through the graph.

For every node: does it depend on the samples, and where in its shape are they? The rules (row_rules.py) are
conservative: what no rule knows is reported as *coupling* the samples, and then each rank's mini-batch runs
whole. That is right for any model; it only rules microbatches out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rannd.graph.row_rules import CLASS_LOSSES, RULES, Operation, pointwise
from rannd.graph.row_states import COUNT, FIXED, WHOLE, Coupled, Reduction, RowIndex, Rows, Scalar, State
from rannd.graph.signature import Signature
from rannd.graph.sizes import PROBE_ROWS, is_number, number_at, shape_at
from rannd.graph.trace import Traced, arguments, attribute, operator_name

SCALAR_LINEAR = {"neg", "to", "_to_copy", "clone", "detach", "alias", "view", "reshape", "squeeze", "unsqueeze", "contiguous",
                 "double", "float", "lift_fresh_copy", "flatten", "ravel"}  # fmt: skip
"""Operators under which a reduced number stays what it is."""


@dataclass(frozen=True)
class RowAnalysis:
    """Where the samples are.

    `coupled` says which op mixes samples (None: rows are independent). `weighted` lists operands that have to
    be multiplied by the piece's share of the rows so that the sum they enter adds up over pieces:
    (node, name of the argument).
    """

    states: Mapping[Node, State]
    coupled: str | None
    weighted: tuple[tuple[Node, str], ...] = ()
    masked: tuple[Node, ...] = ()
    """Losses averaged over the labels that count, where the labels are known before the first piece runs."""


@dataclass
class _Walk:
    states: dict[Node, State] = field(default_factory=dict)
    coupled: str | None = None
    weighted: list[tuple[Node, str]] = field(default_factory=list)
    masked: list[Node] = field(default_factory=list)
    early: Set[Node] = frozenset()

    def couple(self, node: Node, reason: str) -> None:
        if self.coupled is None:
            self.coupled = f"{reason} ({node.name}{_where(node)})"


def analyse(traced: Traced, signature: Signature, early: Set[Node]) -> RowAnalysis:
    """Follow the samples through a traced model; `early` nodes are computed from the inputs alone."""
    walk = _Walk(early=early)
    inputs: list[State] = [Rows(0, 1, 1) if spec.batch else FIXED for spec in signature.tensors]
    _walk(walk, traced.graph, traced.root, inputs)
    for node in traced.results:
        state = walk.states[node]
        if isinstance(state, RowIndex) or (isinstance(state, Rows) and state.outer != 1):
            walk.couple(node, "an output does not have the samples in order")
    return RowAnalysis(walk.states, walk.coupled, tuple(walk.weighted), tuple(walk.masked))


def module_of(node: Node) -> str:
    """Dotted path of the user's module that ran the op ('' for the model itself)."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    name = path.removeprefix("L['self'].").removeprefix("model").removeprefix(".")
    return "" if name.startswith("_empty") else name


def _where(node: Node) -> str:
    module = module_of(node)
    return f" in module {module}" if module else ""


def _walk(walk: _Walk, graph: Graph, root: GraphModule, inputs: Sequence[State]) -> tuple[State, ...]:
    """Compute the state of every node; returns the states of the graph's outputs."""
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            walk.states[node] = next(given)
        elif node.op == "get_attr":
            walk.states[node] = FIXED
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
            return tuple(_state(walk, result) for result in results)
        else:
            walk.states[node] = _result(walk, node, root)
    raise AssertionError("a graph without output")


def _state(walk: _Walk, value: Any) -> State:
    if isinstance(value, Node):
        return walk.states[value]
    if isinstance(value, (list, tuple)) and any(isinstance(item, Node) and walk.states[item] is COUNT for item in value):
        return COUNT
    return FIXED


def _result(walk: _Walk, node: Node, root: GraphModule) -> State:
    value = node.meta.get("val")
    if is_number(value):
        return COUNT if number_at(value, 2) != number_at(value, 3) else FIXED
    states = [walk.states[source] for source in node.all_input_nodes]
    if all(state is FIXED for state in states):
        return FIXED
    if node.target is operator.getitem:
        source = walk.states[node.args[0]]  # type: ignore[index]
        return source[node.args[1]] if isinstance(source, tuple) else WHOLE  # type: ignore[index]
    try:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return _nested(walk, node, root)
        if any(state is WHOLE or isinstance(state, tuple) for state in states) and not _reduces(node):
            raise Coupled(f"{operator_name(node.target)} follows an op that mixes samples")
        if any(isinstance(state, Scalar) for state in states):
            return _scalar(walk, node)
        return _apply(walk, node)
    except Coupled as reason:
        walk.couple(node, str(reason))
        return WHOLE


def _base_name(node: Node) -> str:
    return operator_name(node.target).removeprefix("aten::").split(".")[0]


def _reduces(node: Node) -> bool:
    """Whether a node makes one number of all samples, of whatever layout."""
    return _base_name(node) in ("sum", "mean") or _base_name(node).endswith(("_loss", "_entropy", "_with_logits", "kl_div"))


def _apply(walk: _Walk, node: Node) -> State:
    """The state by the operator's rule."""
    if not isinstance(node.target, torch._ops.OpOverload):
        raise Coupled(f"{operator_name(node.target)} is not followed")
    name = _base_name(node)
    named = arguments(node)
    result = node.meta.get("val")
    if _reduces(node) and named.get("dim") in (None, []) and isinstance(result, torch.Tensor) and result.ndim == 0:
        first = walk.states[node.all_input_nodes[0]]
        if first is WHOLE and name in ("sum", "mean"):
            return Scalar(Reduction.MEAN if name == "mean" else Reduction.SUM)
    operation = Operation(
        name,
        node,
        named,
        lambda value: _state(walk, value),
        lambda value: shape_at(value.meta["val"], PROBE_ROWS) if isinstance(value, Node) else (),
    )
    if name in CLASS_LOSSES and named["reduction"] == 1:
        return _masked_mean(walk, node, named)
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in node.target.tags:
        rule = pointwise
    if rule is None:
        raise Coupled(f"no rule knows what {operator_name(node.target)} does to the samples")
    return rule(operation)


def _masked_mean(walk: _Walk, node: Node, named: dict[str, Any]) -> State:
    """A mean over the labels that count: its denominator differs from piece to piece."""
    target = named["target"]
    if target.meta["val"].is_floating_point() and named.get("weight") is None:
        return Scalar(Reduction.MEAN)
    if named.get("weight") is None and target in walk.early:
        walk.masked.append(node)
        return Scalar(Reduction.EXACT)
    walk.couple(node, "a mean over labels has class weights, or labels that the model itself computes")
    return Scalar(Reduction.MEAN)


def _nested(walk: _Walk, node: Node, root: GraphModule) -> State:
    """A region of its own (no_grad, autocast): follow the samples inside."""
    modules = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr" and isinstance(attribute(root, str(a.target)), GraphModule)]  # fmt: skip
    if len(modules) != 1:
        raise Coupled(f"{operator_name(node.target)} is not followed")
    inner = attribute(root, str(modules[0].target))
    after = node.args[node.args.index(modules[0]) + 1 :]
    return _walk(walk, inner.graph, inner, [_state(walk, argument) for argument in after])


def _scalar(walk: _Walk, node: Node) -> State:
    """Arithmetic on numbers that were reduced over all samples: linear operators keep them additive."""
    name = _base_name(node)
    named = arguments(node)
    operands = {key: value for key, value in named.items() if key in ("self", "other", "tensors", "input")}
    if name in SCALAR_LINEAR:
        return walk.states[node.all_input_nodes[0]]
    if name in ("sum", "mean"):
        return walk.states[node.all_input_nodes[0]]
    if name == "stack":
        kinds = {_state(walk, item) for item in named["tensors"]}
        if len(kinds) == 1:
            return kinds.pop()
        raise Coupled("losses of different kinds are stacked")
    if name in ("add", "sub", "rsub"):
        return _sum(walk, node, operands)
    if name in ("mul", "div"):
        left, right = (_state(walk, operands[key]) for key in ("self", "other"))
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
    raise Coupled(f"{operator_name(node.target)} of a number made of all samples is not linear")


def _linear(value: Any) -> bool:
    """Whether a number is proportional to the rows."""
    number = value.meta["val"]
    return bool(number_at(number, 2) * 3 == number_at(number, 3) * 2)


def _sum(walk: _Walk, node: Node, operands: dict[str, Any]) -> State:
    """Terms of one kind stay of that kind; different ones are weighted first, so that the sum adds up."""
    states = {key: _state(walk, value) for key, value in operands.items()}
    kinds = set(states.values())
    if len(kinds) == 1:
        return kinds.pop()
    for state in states.values():
        if not (state is FIXED or isinstance(state, Scalar)) or state == Scalar(Reduction.OTHER):
            raise Coupled("a number made of all samples meets single samples")
    if kinds == {FIXED, Scalar(Reduction.MEAN)}:
        return Scalar(Reduction.MEAN)
    for key, state in states.items():
        if state is FIXED or state == Scalar(Reduction.MEAN):
            walk.weighted.append((node, key))
    return Scalar(Reduction.EXACT)
