"""Build the ModelGraph of a model: traced graph, placement, loss weights and task graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from rannd.graph.call.call_errors import explained
from rannd.graph.call.signature import Signature
from rannd.graph.fx.flops import computing_type, forward_flops
from rannd.graph.fx.ir import Op, Param, Size, TaskGraph, Value
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import call_of
from rannd.graph.fx.retarget import retarget
from rannd.graph.fx.sizes import is_plain_tensor, polynomial, tensor_bytes
from rannd.graph.fx.traced import Traced, operator_name
from rannd.graph.modules.source_location import described
from rannd.graph.partition.cut_point import Segments, segments
from rannd.graph.partition.graph_hash import graph_hash, structures
from rannd.graph.partition.placement import Placement, place
from rannd.graph.rows import loss_weights
from rannd.graph.rows.analysis import RowAnalysis, analyse
from rannd.graph.tracing.dropout import switch as switch_dropout


@dataclass(frozen=True)
class ModelGraph:
    """A traced graph of a model with the results of all analyses."""

    signature: Signature
    traced: Traced
    placement: Placement
    task: TaskGraph
    nodes: Mapping[str, Node]
    """Maps the name of each operator of the task graph to its node."""
    results: tuple[loss_weights.Result, ...]
    weights: tuple[str, ...]
    """Names of the placeholders of loss weights, which follow the tensors of the signature."""
    label_counts: GraphModule | None
    """Computes the denominators of means from a rank's arguments, see loss_weights.label_counts."""
    coupled: str | None
    """Why samples depend on each other; None if they do not."""
    analysis: RowAnalysis
    """Which dimension of each value holds the samples."""
    device: torch.device
    """Where it runs."""
    idle_cuts: tuple[str, ...] = ()
    """Messages about CutPoints that have no effect."""

    @property
    def sole_loss(self) -> Node | None:
        """The scalar output at which backward starts; None unless there is exactly one candidate."""
        mode = self.signature.mode
        found = [
            (node, result.kind)
            for node, result in zip(self.traced.results, self.results, strict=True)
            if node in self.placement.requires_grad and not node.meta["val"].shape
        ]
        if not (mode.training and mode.grad) or [kind for _, kind in found] != ["global"]:
            return None
        loss = found[0][0]
        return loss if loss.meta["val"].dtype.is_floating_point else None


def trace(
    model: nn.Module,
    signature: Signature,
    leaves: list[torch.Tensor],
    device: torch.device,
    assumed: Sequence[bool] | None = None,
    opaque: Sequence[str] = (),
) -> tuple[Traced, Signature]:
    """Call `rannd.graph.tracing.frontend.trace`, imported lazily because cached runs do not need it."""
    from rannd.graph.tracing import frontend

    return frontend.trace(model, signature, leaves, device, assumed, opaque)


def build(
    model: nn.Module,
    signature: Signature,
    leaves: list[torch.Tensor],
    device: torch.device,
    traced: Traced | None = None,
) -> ModelGraph:
    """Trace `model` for calls with `signature` and run all analyses needed to plan, partition and execute it.

    `leaves` are the tensors of a real call; `device` is where the graph will run. If `traced` is given (from the
    cache), the model is not traced again.
    """
    if traced is None:
        with explained(model, signature, leaves):
            traced, signature = trace(model, signature, leaves, device)
    switch_dropout(traced, model, signature, lambda other: trace(model, other, leaves, device)[0])
    traced = retarget(traced, device)
    cuts = segments(traced, model)
    digest = cuts.hash(graph_hash(traced, signature, model), traced.graph)
    placement = place(traced, signature)
    analysis = analyse(traced, signature, placement.early)
    results = loss_weights.results(traced, analysis)
    counts = loss_weights.label_counts(traced, analysis.masked)
    weights = loss_weights.weigh(traced, analysis)
    loss_weights.keep_single_rows(analysis)
    placement = place(traced, signature)
    nodes = {f"{number}:{_short(node)}": node for number, node in enumerate(placement.placed)}
    coupled = analysis.coupled is not None
    task = _task_graph(model, traced, placement, nodes, digest, signature.mode.autocast, coupled, cuts, results)
    return ModelGraph(
        signature,
        traced,
        placement,
        task,
        nodes,
        results,
        weights,
        counts,
        analysis.coupled,
        analysis,
        device,
        cuts.idle,
    )


def _short(node: Node) -> str:
    return operator_name(node.target).removeprefix("aten::")


def _task_graph(
    model: nn.Module,
    traced: Traced,
    placement: Placement,
    nodes: Mapping[str, Node],
    digest: str,
    autocast: str,
    coupled: bool,
    cuts: Segments,
    results: Sequence[loss_weights.Result],
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
        buffer = not isinstance(tensor, nn.Parameter)
        params.append(Param(name, size, tensor.requires_grad, buffer, tensor.element_size()))

    values: list[Value] = []
    value_number: dict[Node, int] = {}
    result_of = dict(zip(traced.results, results, strict=True))

    def value(node: Node, producer: int) -> int:
        if node not in value_number:
            size = tensor_bytes(node.meta["val"]) if is_plain_tensor(node) else Size()
            value_number[node] = len(values)
            result = result_of.get(node)
            sent = result is None or result.is_sent
            values.append(Value(node.name, producer, size, node in placement.requires_grad, result is not None, sent))
        return value_number[node]

    ops: list[Op] = []
    known = structures(traced, placement, autocast)
    segment = cuts.number(traced.graph)
    for number, (name, node) in enumerate(nodes.items()):
        inputs = tuple(value(source, -1) for source in known[node].inputs)
        ops.append(
            Op(
                name=name,
                target=operator_name(node.target),
                hash=known[node].digest,
                inputs=inputs,
                outputs=(value(node, number),),
                params=tuple(param_number[traced.attributes[each]] for each in known[node].tensors),
                flops=polynomial(_flops(node)),
                group=placement.group[node],
                module=node.meta.get("module", ""),
                segment=segment[node],
                dtype=computing_type(node),
                opaque=described(model, call_of(str(node.args[0]))[1].path)
                if operator_name(node.target) == LEAF
                else "",
                source=node.meta.get("line", ""),
            )
        )
    used = {param for op in ops for param in op.params}
    unused = tuple(number for number in range(len(params)) if number not in used)
    return TaskGraph(digest, tuple(ops), tuple(values), tuple(params), coupled, unused)


def _flops(node: Node) -> Callable[[int], float]:
    return lambda rows: forward_flops(node, rows)
