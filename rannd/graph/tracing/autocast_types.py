"""Types of values under autocast, where operators cast inside of themselves.

Export records an operator such as `lstm` or `upsample_bilinear2d` below autocast, and there computes the type of its
result from types of arguments that nothing has cast. When a stage runs, autocast acts inside of the operator as well.
So the graph is run once on tensors without values, under the autocast of the call, and has the types found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from rannd import log
from rannd.graph.call.signature import Signature
from rannd.graph.fx.sizes import is_known, shape_at
from rannd.graph.fx.symbolic_values import TensorValue, Value, with_lengths
from rannd.graph.fx.traced import Traced, attribute

ROWS = 3
"""Rows to run with, unless a graph has a fixed number."""


def settle_types(
    traced: Traced, signature: Signature, device: torch.device, lengths: Mapping[sympy.Symbol, int] | None = None
) -> None:
    """Correct the types of a graph's values, in place. To be called where the model was traced, under its autocast.

    Types stay as they were recorded where an operator cannot run without values; a stage that sends a value of another
    type than recorded raises a StepError.

    Args:
        traced: A graph that was traced as on `device`.
        signature: Of the calls that it is for.
        device: Where it will run.
        lengths: Sizes to run with, of the dimensions that a template leaves open.
    """
    nodes = list(traced.graph.nodes)
    if not signature.mode.autocast and not any("autocast" in str(node.target) for node in nodes):
        return
    try:
        _settle(traced, nodes, signature.fixed_rows or ROWS, device, lengths or {})
    except Exception as exc:  # kernels for fake tensors raise what they like
        log.get("RaNNCModule").debug("Types under autocast are not known exactly: %s", exc)


def _settle(
    traced: Traced, nodes: Sequence[Node], rows: int, device: torch.device, lengths: Mapping[sympy.Symbol, int]
) -> None:
    if not all(is_known(value) for node in nodes if isinstance(value := node.meta.get("val"), TensorValue)):
        return  # sizes that depend on values: nothing can be run without values
    found: dict[Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for node in nodes:
            value = node.meta.get("val")
            if node.op == "output":
                continue
            if node.op == "call_function":
                args, kwargs = pytree.tree_map_only(Node, found.__getitem__, (node.args, node.kwargs))
                found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                node.meta["val"] = _with_types(value, found[node])
            elif isinstance(value, TensorValue):
                here = with_lengths(value, lengths)
                assert isinstance(here, TensorValue)
                shape = shape_at(here, rows)
                found[node] = torch.empty(shape, dtype=value.dtype, device="cpu" if value.host else device)
            else:
                found[node] = attribute(traced.root, str(node.target))


def _with_types(value: Value, found: Any) -> Value:
    """A value with the types of what was found in its place."""
    if isinstance(value, tuple):
        return tuple(_with_types(each, other) for each, other in zip(value, found, strict=True))
    return replace(value, dtype=found.dtype) if isinstance(value, TensorValue) else value
