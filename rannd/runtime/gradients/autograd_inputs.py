"""Supports ``backward(inputs=...)`` and ``torch.autograd.grad`` with respect to parameters of deployed models.

A deployed model's parameters are not in the script's autograd graph, because their gradients are reduced over all
ranks. They are represented by the model's *anchor*, an input of each of its calls: autograd runs its node if gradients
of parameters are requested at all, as in a plain ``loss.backward()``, but not if a script requests only gradients of
inputs. While models are wrapped, a function of this file wraps autograd's engine and replaces parameters among the
requested inputs by their model's anchor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rannd import log, patches
from rannd.errors import UsageError
from rannd.runtime.parameters.absent import is_absent, part_of
from rannd.runtime.parameters.ownership import Parameters

# `backward` and `grad` call it, under whatever name they were imported.
_ENGINE = patches.declare(
    "gradients with respect to given inputs",
    torch.autograd,
    "_engine_run_backward",
    "parameters of deployed models are not in the script's autograd graph",
)


@dataclass(frozen=True)
class Asked:
    """Gradients of parameters that a script requests from one backward."""

    ids: frozenset[int] = frozenset()
    """id() of each requested parameter."""
    found: dict[int, torch.Tensor] | None = field(default=None, compare=False)
    """Receives the gradients by id() of the parameter; None: they are accumulated into `grad`."""


NOTHING = Asked()

_asked: Asked | None = None
_anchors: list[weakref.ReferenceType[Anchor]] = []


class Anchor:
    """Represents the parameters of a deployed model in the script's autograd graph."""

    def __init__(self, parameters: Parameters) -> None:
        with torch.inference_mode(False), torch.enable_grad():  # the first call may be an evaluation
            self.leaf = torch.zeros((), requires_grad=True)
            self.tensor = self.leaf.view_as(self.leaf)  # autograd does not tell whether a leaf's node will run
        self.ids = frozenset(id(t) for t in parameters.tensors.values() if isinstance(t, torch.nn.Parameter))
        self._node = torch.autograd.graph.get_gradient_edge(self.tensor).node
        _anchors.append(weakref.ref(self, _anchors.remove))

    def asked(self) -> Asked | None:
        """Gradients requested from the running backward; None: of all parameters, accumulated into their `grad`."""
        return _asked if torch._C._will_engine_execute_node(self._node) else NOTHING


def _run(
    original: Callable[..., Any],
    outputs: Any,
    gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Replacement of autograd's engine that replaces requested parameters by anchors."""
    global _asked

    def call(inputs: Sequence[Any], allow: bool) -> Any:
        return original(outputs, gradients, retain_graph, create_graph, inputs, allow, accumulate_grad=accumulate_grad)

    anchors = [anchor for each in _anchors if (anchor := each()) is not None]
    ids = {id(each) for each in inputs}
    concerned = [anchor for anchor in anchors if ids & anchor.ids]
    if not concerned:
        return call(inputs, allow_unreachable)
    ours = frozenset().union(*(anchor.ids for anchor in concerned)) & ids
    others = [each for each in inputs if id(each) not in ours]
    elsewhere = (each for each in inputs if is_absent(each) and part_of(each) is None)
    absent = None if accumulate_grad else next(elsewhere, None)
    if absent is not None:
        raise UsageError(
            f"torch.autograd.grad with respect to {absent!r}: its gradient is on the rank that holds it. Pass "
            "model.parameters(own=True), the parameters of this rank, or call backward()"
        )
    given = (*others, *(anchor.leaf if accumulate_grad else anchor.tensor for anchor in concerned))
    before, _asked = _asked, Asked(ours, None if accumulate_grad else {})
    try:
        result = call(given, True)
        found = _asked.found
    finally:
        _asked = before
    if found is None:
        return result
    values = iter(result)
    result = tuple(found.get(id(each)) if id(each) in ours else next(values) for each in inputs)
    if not allow_unreachable and any(each is None for each in result):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
            "if this is the desired behavior."
        )
    return result


def install() -> None:
    """Wrap autograd's engine, until `remove`."""
    if hasattr(_ENGINE.target, _ENGINE.attribute):
        patches.install(_ENGINE.around(_run))
        return
    log.get("RaNNCModule").warning(
        "torch %s has no torch.autograd.%s: backward(inputs=...) and torch.autograd.grad find no parameters of "
        "wrapped models; use backward() alone",
        torch.__version__,
        _ENGINE.attribute,
    )


def remove() -> None:
    """Restore torch's function."""
    patches.remove(_ENGINE)
