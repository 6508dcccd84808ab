"""Cut the graph of a model into stages, at random or evenly, and run it stage by stage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from pieces import Outcome, state_of, weights_of
from torch import Tensor, nn
from torch.fx import Node

from rannd.graph.fx.sizes import number_at
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, cut, extract_segments


def random_stages(graph: ModelGraph, stages: int, generator: random.Random) -> dict[Node, int]:
    """Some stage for every op: not before what it reads, and one for each group."""
    placement = graph.placement
    stage = dict.fromkeys(placement.group.values(), 0)
    for node in placement.placed:
        if generator.random() < 2 * stages / len(placement.placed):
            group = placement.group[node]
            stage[group] = max(stage[group], generator.randrange(stages))
    changed = True
    while changed:
        changed = False
        for node in placement.placed:
            least = max((stage[placement.group[s]] for s in placement.reads[node] if s.op != "placeholder"), default=0)
            if stage[placement.group[node]] < least:
                stage[placement.group[node]] = least
                changed = True
    return {node: stage[placement.group[node]] for node in placement.placed}


def balanced_stages(graph: ModelGraph, stages: int) -> dict[Node, int]:
    """Stages with about equally many ops; fewer of them where the groups leave fewer places to cut."""
    placed = graph.placement.placed
    ends: list[set[Node]] = []  # all that can be behind a cut, smaller and smaller
    for first in range(1, len(placed)):
        end = _from(graph, first)
        if len(end) < len(ends[-1] if ends else placed):
            ends.append(end)
    chosen: list[set[Node]] = []
    for number in range(1, min(stages, len(ends) + 1)):
        left = ends[: len(ends) - (min(stages, len(ends) + 1) - 1 - number)]
        if chosen:
            left = [end for end in left if len(end) < len(chosen[-1])]
        chosen.append(min(left, key=lambda end: abs(len(end) - len(placed) * (stages - number) / stages)))
    return {node: sum(node in end for end in chosen) for node in placed}


def _from(graph: ModelGraph, first: int) -> set[Node]:
    """The placed ops from number `first` on, and all that has to come with or after them."""
    placement = graph.placement
    readers: dict[Node, list[Node]] = {}
    members: dict[int, list[Node]] = {}
    for node in placement.placed:
        members.setdefault(placement.group[node], []).append(node)
        for source in placement.reads[node]:
            readers.setdefault(source, []).append(node)
    stack = list(placement.placed[first:])
    found = set(stack)
    while stack:
        node = stack.pop()
        for other in (*members[placement.group[node]], *readers.get(node, ())):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


def parts_of(graph: ModelGraph, stage_of: Mapping[Node, int]) -> tuple[Part, ...]:
    """The stages as modules."""
    count = max(stage_of.values(), default=0) + 1
    return cut(graph.traced, graph.placement, stage_of, [f"Stage{number}" for number in range(count)])


def segments_of(graph: ModelGraph, number_of: Mapping[Node, int], recompute: bool = False) -> tuple[Part, ...]:
    """The same parts as segments of one stage."""
    numbers = range(max(number_of.values(), default=0) + 1)
    members = [{node for node, number in number_of.items() if number == each} for each in numbers]
    segments = [(f"Segment{number}", mine, recompute) for number, mine in enumerate(members)]
    return tuple(extract_segments(graph.traced, graph.placement, segments))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Puts the buffers back at the end; gives a dict that is filled with their values just before that."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after: dict[str, Tensor] = {}
    try:
        yield after
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                after[name] = buffer.clone()
                buffer.copy_(before[name])


def run_stages(graph: ModelGraph, model: nn.Module, parts: tuple[Part, ...], tensors: list[Tensor]) -> Outcome:
    """Outputs and gradients, stage by stage, with a new autograd graph in each.

    What one gets from another lies without gaps in memory, as a message does.
    """
    model.zero_grad(set_to_none=True)
    rows = graph.signature.rows(tensors)
    state = state_of(graph, model)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    given = [*leaves, *weights_of(graph, tensors, rows, rows)]
    values: dict[Node, Tensor] = dict(zip(graph.traced.placeholders, given, strict=True))
    taken: list[dict[Node, Tensor]] = []
    made: list[dict[Node, Tensor]] = []
    for part in parts:
        inputs = {}
        for node in part.inputs:
            value = values[node].detach()
            value = value.contiguous() if node in graph.placement.group else value  # not what segments hand over
            inputs[node] = value.requires_grad_() if node in graph.placement.requires_grad else value
        found = part.module(*inputs.values(), *(state[name] for name in part.tensors), *part.numbers_at(rows))
        outputs = dict(zip(part.outputs, found, strict=True))
        values.update({node: value.detach() for node, value in outputs.items()})
        taken.append(inputs)
        made.append(outputs)
    results: list[Any] = []
    gradients: dict[Node, Tensor] = {}
    for node in graph.traced.results:
        if node not in values:
            results.append(number_at(node.meta["val"], rows))
            continue
        results.append(values[node])
        if node in graph.placement.requires_grad:
            gradients[node] = _seed(values[node])
    for inputs, outputs in zip(reversed(taken), reversed(made), strict=True):
        roots = [(v, gradients[n]) for n, v in outputs.items() if n in gradients and v.requires_grad]
        if roots:
            torch.autograd.backward([v for v, _ in roots], [g for _, g in roots])
        for node, value in inputs.items():
            if value.grad is not None:
                gradients[node] = gradients[node] + value.grad if node in gradients else value.grad
    found_gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for number, (node, leaf) in enumerate(zip(graph.traced.placeholders, leaves, strict=False)):
        if leaf.requires_grad and node in gradients:
            found_gradients[f"input {number}"] = gradients[node]
    return results, found_gradients


def run_eager(graph: ModelGraph, model: nn.Module, tensors: list[Tensor]) -> Outcome:
    """Outputs and gradients of the model itself."""
    model.zero_grad(set_to_none=True)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    args, kwargs = graph.signature.unflatten(leaves)
    outputs = _in_order(graph, model(*args, **kwargs))
    roots = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    torch.autograd.backward(roots, [_seed(value) for value in roots])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {n}": leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}
    return [value.detach() if isinstance(value, Tensor) else value for value in outputs], gradients


def _in_order(graph: ModelGraph, result: Any) -> list[Any]:
    """What is in a model's own result in the places of the graph's outputs; all its tensors have such a place."""
    marks = [object() for _ in graph.traced.results]
    place = {
        mark: pytree.keystr(path)
        for path, mark in pytree.tree_leaves_with_path(graph.traced.outputs.unflatten(list(marks)))
    }
    found = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(result)}
    missing = {name for name, leaf in found.items() if isinstance(leaf, Tensor)} - set(place.values())
    assert not missing, f"no output of the graph is {missing}"
    return [found[place[mark]] for mark in marks]


def _seed(value: Tensor) -> Tensor:
    """A gradient that is another for each element."""
    return torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
