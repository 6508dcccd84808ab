"""The one place that says where a graph's values are: on the device of the rank that runs it, or on the CPU.

Graphs are traced as on the job's type of device (tracing/on_device.py), by whichever rank. So what is not on the CPU
belongs on the rank's own device; what is, the model itself has put there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from rannd.graph.fx.fx_names import any_name
from rannd.graph.fx.traced import Traced, attribute


def retarget(traced: Traced, device: torch.device) -> Traced:
    """Move a graph to `device`: devices among the arguments of operators and the outputs, and constants.

    The graph is changed in place; it has been traced for a device of this type.
    """
    with any_name():
        _retarget(traced.graph, traced.root, device)
        for node, name in traced.attributes.items():
            if name in traced.constants:
                _move(traced.root, str(node.target), device)
        if traced.decisions is not None:
            module = traced.decisions.module
            _retarget(module.graph, module, device)
            for node in module.graph.find_nodes(op="get_attr"):
                _move(module, str(node.target), device)
            module.recompile()
    constants = {name: traced.tensor(node) for node, name in traced.attributes.items() if name in traced.constants}
    outputs = {place: _there(value, device) for place, value in traced.outputs.constants.items()}
    return replace(
        traced, constants={**traced.constants, **constants}, outputs=replace(traced.outputs, constants=outputs)
    )


def _retarget(graph: Graph, root: nn.Module, device: torch.device) -> None:
    for node in graph.nodes:
        if node.op == "call_function":  # devices are direct arguments, never inside lists
            if any(isinstance(value, torch.device) for value in node.args):
                node.args = tuple(_there(value, device) for value in node.args)
            if any(isinstance(value, torch.device) for value in node.kwargs.values()):
                node.kwargs = {name: _there(value, device) for name, value in node.kwargs.items()}
        elif node.op == "get_attr":
            inner = attribute(root, str(node.target))
            if isinstance(inner, GraphModule):
                _retarget(inner.graph, inner, device)
                inner.recompile()


def _there(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type != "cpu" else value


def _move(root: nn.Module, target: str, device: torch.device) -> None:
    """Replace a constant that is on another device by a copy."""
    path, _, name = target.rpartition(".")
    holder = attribute(root, path) if path else root
    value = getattr(holder, name)
    if isinstance(value, torch.Tensor) and not value.is_meta and _there(value.device, device) != value.device:
        setattr(holder, name, value.to(device))
