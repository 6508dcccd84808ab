"""Switch dropout on or off in a traced graph, independent of the training flags of the modules.

*Off*: disabled in every operator with a dropout probability: `F.dropout`, attention, recurrent layers.
*On*: `nn.Dropout`, `nn.MultiheadAttention`, `nn.Transformer` and recurrent layers are traced in training mode. Every
other operator gets the dropout arguments of its counterpart in a trace of the model in training mode, because in
evaluation `F.scaled_dot_product_attention(..., dropout_p=self.p if self.training else 0.0)` does not show `p`. It is an
error if an operator that drops in training does not run in evaluation.

Dropout that modules implement with random numbers (`torch.bernoulli`, stochastic depth) is not recognized, and is not
changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from rannd.errors import TraceError
from rannd.graph.call.signature import Mode, Signature
from rannd.graph.fx.aliasing import base_name
from rannd.graph.fx.traced import Traced, arguments, attribute
from rannd.graph.modules.dropout_override import KNOWN, as_in_training


@contextlib.contextmanager
def traced_with(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Set the training flag of torch's dropout modules within the context if `mode` enables dropout."""
    with as_in_training([each for each in model.modules() if isinstance(each, KNOWN)] if mode.dropout else ()):
        yield


def switch(
    traced: Traced,
    model: nn.Module,
    signature: Signature,
    trace: Callable[[Signature], Traced],
) -> None:
    """Edit a graph traced for `signature` so that its dropout follows the signature's mode.

    `trace` traces the model again for another signature. TraceError if dropout cannot be switched on.
    """
    enabled = signature.mode.dropout
    if enabled is None:
        return
    if traced.leaves is not None:
        traced.leaves.dropout = enabled
    if not enabled:
        for node in _sites(traced.root, traced.graph.nodes):
            _set(node, _OFF)
        _recompile(traced)
    elif not all(module.training for module in model.modules()):
        _as_trained(traced, model, signature, trace)
        _recompile(traced)


def _as_trained(traced: Traced, model: nn.Module, signature: Signature, trace: Callable[[Signature], Traced]) -> None:
    mode = dataclasses.replace(signature.mode, training=True, dropout=None)
    try:
        with as_in_training(model.modules()):
            trained = trace(dataclasses.replace(signature, mode=mode))
    except TraceError as exc:
        raise TraceError(
            "enable_dropout(True) in evaluation: the model cannot be traced in training mode to find its dropout: "
            f"{exc}"
        ) from exc
    here, there = _by_place(traced), _by_place(trained)
    for place, wanted in there.items():
        found = here.get(place, [])
        if len(found) == len(wanted):
            for node, like in zip(found, wanted, strict=True):
                _set(node, {name: arguments(like)[name] for name in _OFF if name in arguments(like)})
        elif any(_drops(node) for node in wanted):
            module, name = place
            raise TraceError(
                f"enable_dropout(True) in evaluation: {f'module {module}' if module else 'the model'} runs {name} "
                f"{len(wanted)} times in training and {len(found)} times in evaluation, so its calls cannot be "
                "matched; set the training flag of the modules that are to apply dropout instead (module.train())"
            )


_OFF: dict[str, Any] = {"train": False, "dropout": 0.0, "dropout_p": 0.0, "p": 0.0}
"""Dropout arguments of operators, and their values that disable it."""


def _names(node: Node) -> set[str]:
    """Names of the dropout arguments of an operator; empty for operators without dropout."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return set()
    names = {argument.name for argument in node.target._schema.arguments}
    if "dropout" in names and "train" in names:
        return {"dropout"}  # recurrent layers: cuDNN needs `train` for the backward, even without dropout
    if "dropout_p" in names:
        return {"dropout_p"}
    return {"p", "train"} if {"p", "train"} <= names else set()


def _drops(node: Node) -> bool:
    named = arguments(node)
    return all(bool(named[name]) for name in _names(node))


def _set(node: Node, values: dict[str, Any]) -> None:
    """Change the dropout arguments of an operator."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name not in _names(node) or argument.name not in values:
            continue
        if place < len(node.args):
            node.update_arg(place, values[argument.name])
        else:
            node.update_kwarg(argument.name, values[argument.name])


def _sites(root: nn.Module, nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield all operators with dropout arguments, including those in nested graphs."""
    for node in nodes:
        if _names(node):
            yield node
        elif node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                yield from _sites(inner, inner.graph.nodes)


def _by_place(traced: Traced) -> dict[tuple[str, str], list[Node]]:
    found: dict[tuple[str, str], list[Node]] = {}
    for node in _sites(traced.root, traced.graph.nodes):
        found.setdefault((node.meta.get("module", ""), base_name(node)), []).append(node)
    return found


def _recompile(traced: Traced) -> None:
    def inside(root: nn.Module, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op == "get_attr" and isinstance(inner := attribute(root, str(node.target)), GraphModule):
                inside(inner, inner.graph.nodes)
                inner.recompile()

    inside(traced.root, traced.graph.nodes)
