"""Runs the whole graph of a model with a backward in one go, and in two halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pieces import graph_of, state_of
from torch import Tensor, nn

from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, extract
from rannd.graph.weight_gradients.separation import SeparatedPart, separate
from rannd.graph.weight_gradients.weight_queue import WeightQueue


class Ran(NamedTuple):
    """What a run gives, by name."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    """Gradients of the arguments."""
    first: dict[str, Tensor]
    """Gradients of parameters after the first half."""
    whole: dict[str, Tensor]
    """The same after both."""
    told: list[str]
    """Parameters that were told to have arrived, in this order."""


class Halves:
    """A model as one part, also with a backward in two halves."""

    def __init__(self, model: nn.Module, *tensors: Tensor) -> None:
        self.model, self.tensors = model, tensors
        self.graph: ModelGraph = graph_of(model, *tensors)
        self.part: Part = extract(self.graph.traced, self.graph.placement, set(self.graph.placement.placed), "Whole")
        self.names = [name for name, _ in model.named_parameters()]
        self.separated: SeparatedPart | None = separate(self.part, self.names)

    def run(self, *, halves: bool, upstream: Sequence[Tensor] | None = None) -> Ran:
        """One forward and backward; `upstream`: gradients of the first outputs, random ones for all if None."""
        given = dict(zip(self.graph.traced.placeholders, self.tensors, strict=False))
        inputs = [given[node].detach().clone().requires_grad_(given[node].requires_grad) for node in self.part.inputs]
        state = state_of(self.graph, self.model)
        rows = self.graph.signature.rows(self.tensors)
        arguments: list[Any] = [*inputs, *(state[name] for name in self.part.tensors), *self.part.numbers_at(rows)]
        for parameter in self.model.parameters():
            parameter.grad = None
        queue = WeightQueue()
        with self.graph.signature.mode.autocasting():
            if halves:
                assert self.separated is not None
                outputs = self.separated.module(*arguments, queue)
            else:
                outputs = self.part.module(*arguments)
        roots = [each for each in outputs if each.requires_grad]
        if upstream is None:
            generator = torch.Generator().manual_seed(3)
            upstream = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in roots]
        torch.autograd.backward(roots[: len(upstream)], upstream)
        first = self._gradients()
        arrived: list[Tensor] = []
        queue.accumulate(arrived.append)
        names = {id(each): name for name, each in self.model.named_parameters()}
        told = [names[id(each)] for each in arrived]
        return Ran(list(outputs), [each.grad for each in inputs], first, self._gradients(), told)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: each.grad.clone() for name, each in self.model.named_parameters() if each.grad is not None}

    def check(self, *names: str, upstream: Sequence[Tensor] | None = None, tolerance: float = 1e-12) -> Ran:
        """Both ways give the same, and in two halves the parameters `names` get their gradients in the second one."""
        whole, halves = (self.run(halves=each, upstream=upstream) for each in (False, True))
        for one, other in zip(whole.outputs, halves.outputs, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
        for found, wanted in ((halves.inputs, whole.inputs), (halves.whole, whole.whole)):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert set(whole.whole) - set(halves.first) == set(names)
        return halves
