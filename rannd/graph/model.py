"""A model ready to be planned, cut and run: from tracing to the task graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from rannd.graph import losses
from rannd.graph.flops import forward_flops
from rannd.graph.hashing import graph_hash
from rannd.graph.ir import Op, Param, Size, TaskGraph, Value
from rannd.graph.placement import Placement, place
from rannd.graph.rows import analyse, module_of
from rannd.graph.signature import Signature
from rannd.graph.sizes import is_plain_tensor, polynomial, tensor_bytes
from rannd.graph.trace import Traced, operator_name, retarget, trace


@dataclass(frozen=True)
class ModelGraph:
    """One graph of a model, with all that is known about it."""

    signature: Signature
    traced: Traced
    placement: Placement
    task: TaskGraph
    nodes: Mapping[str, Node]
    """Node of each op of the task graph, by its name."""
    results: tuple[losses.Result, ...]
    weights: tuple[str, ...]
    """Names of the arguments that carry the weights of losses, behind the tensors of the signature."""
    label_counts: GraphModule | None
    """Counts the labels of each averaged loss from the arguments, see losses.label_counts."""
    coupled: str | None
    """Why samples depend on each other; None where they do not."""


def build(model: nn.Module, signature: Signature, leaves: list[torch.Tensor], device: torch.device) -> ModelGraph:
    """Trace `model` for calls with `signature` and find out what is needed to plan, cut and run it.

    `leaves` are the tensors of a real call; `device` is where the graph will run.
    """
    traced = retarget(trace(model, signature, leaves), device)
    digest = graph_hash(traced, signature)
    placement = place(traced, signature)
    analysis = analyse(traced, signature, placement.early)
    results = losses.results(traced, analysis)
    counts = losses.label_counts(traced, analysis.masked)
    weights = losses.weigh(traced, analysis)
    placement = place(traced, signature)
    nodes = {f"{number}:{_short(node)}": node for number, node in enumerate(placement.placed)}
    task = _task_graph(model, traced, placement, nodes, digest, analysis.coupled is not None)
    return ModelGraph(signature, traced, placement, task, nodes, results, weights, counts, analysis.coupled)


def _short(node: Node) -> str:
    return operator_name(node.target).removeprefix("aten::")


def _task_graph(
    model: nn.Module, traced: Traced, placement: Placement, nodes: Mapping[str, Node], digest: str, coupled: bool
) -> TaskGraph:
    params: list[Param] = []
    param_number: dict[str, int] = {}
    state: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in [*named, *traced.constants.items()]:
        if id(tensor) in state:
            continue
        state[id(tensor)] = name
        param_number[name] = len(params)
        size = tensor.numel() * tensor.element_size()
        params.append(Param(name, size, tensor.requires_grad, not isinstance(tensor, nn.Parameter)))

    values: list[Value] = []
    value_number: dict[Node, int] = {}
    results = set(traced.results)

    def value(node: Node, producer: int) -> int:
        if node not in value_number:
            size = tensor_bytes(node.meta["val"]) if is_plain_tensor(node) else Size()
            value_number[node] = len(values)
            values.append(Value(node.name, producer, size, node in placement.requires_grad, node in results))
        return value_number[node]

    ops: list[Op] = []
    for number, (name, node) in enumerate(nodes.items()):
        inputs = tuple(value(source, -1) for source in placement.reads[node])
        read = tuple(sorted({param_number[traced.attributes[a]] for a in placement.attributes[node]}))
        flops = polynomial(_flops(node))
        output = (value(node, number),)
        ops.append(
            Op(name, operator_name(node.target), inputs, output, read, flops, placement.group[node], module_of(node))
        )
    used = {param for op in ops for param in op.params}
    unused = tuple(number for number in range(len(params)) if number not in used)
    return TaskGraph(digest, tuple(ops), tuple(values), tuple(params), coupled, unused)


def _flops(node: Node) -> Callable[[int], float]:
    return lambda rows: forward_flops(node, rows)
