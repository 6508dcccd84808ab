"""Attach a call's outputs to the script's autograd graph with a custom autograd.Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rannd.device.reads import moved
from rannd.errors import StepError
from rannd.runtime.comm import process_flags
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.outputs import NotSent
from rannd.runtime.execution.shared_batch import Share
from rannd.runtime.execution.step import Step


def attach(
    executor: Executor,
    step: Step,
    tensors: Sequence[torch.Tensor],
    outputs: list[Any],
    delayed: Callable[[], bool],
    share: Share | None = None,
) -> list[Any]:
    """Attach the outputs of a call with `tensors` to the script's autograd graph.

    Backward reduces the gradients of parameters unless `delayed()` is true. `share` is given if all ranks share the
    mini-batch of rank 0.
    """
    graph = executor.bound.graph
    places = [
        place
        for place, value in enumerate(outputs)
        if isinstance(value, torch.Tensor) and not isinstance(value, NotSent)
    ]
    nodes = graph.traced.results
    marked = [nodes[place] in graph.placement.requires_grad for place in places]
    if not any(marked):
        return outputs
    bridge = _Backward(executor, step, len(outputs), places, delayed, share)
    # Detached: autograd forbids in-place writes into differentiable views that a custom Function returns.
    values = [outputs[place].detach() for place in places]
    attached: tuple[torch.Tensor, ...] = _Bridge.apply(bridge, marked, values, executor.anchor.tensor, *tensors)  # type: ignore[no-untyped-call]
    for place, value in zip(places, attached, strict=True):
        outputs[place] = value
    return outputs


class _Backward:
    """Runs the backward of a call for `_Bridge`."""

    def __init__(
        self,
        executor: Executor,
        step: Step,
        outputs: int,
        places: Sequence[int],
        delayed: Callable[[], bool],
        share: Share | None,
    ) -> None:
        self._executor = executor
        self._step = step
        self._outputs = outputs
        self._places = places
        self._delayed = delayed
        self._share = share

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute gradients of the call's input tensors from those of its tensor outputs."""
        with self._executor.subject.speaking():
            return self._run(gradients)

    def _run(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        given: list[torch.Tensor | None] = [None] * self._outputs
        for place, gradient in zip(self._places, gradients, strict=True):
            given[place] = gradient
        if torch.is_grad_enabled():
            raise StepError(
                "backward(create_graph=True) through a RaNNCModule: its gradients have no gradients of their own; "
                "train what needs those (a gradient penalty, say) outside of the wrapped model"
            )
        again = process_flags.keeps_graph or torch._C._autograd._get_current_graph_task_keep_graph()
        executor, step, reduced = self._executor, self._step, not self._delayed()
        with executor.world.watch.inside("backward"):
            if self._share is not None:
                given = self._share.gradients(given)
            if step.audit is not None:
                step.audit.before_backward(given)
            found = executor.backward(step, given, reduce=reduced, again=again)
            executor.world.issued.note()
            executor.world.watch.ensure_intact()
            inputs = found if self._share is None else self._share.input_gradients(found)
        if step.audit is not None:
            audit, step.audit = step.audit, None  # another backward (retain_graph) keeps nothing more
            audit.finish(
                found,
                pieces=step.pieces,
                inside=step.interleaved,
                seed=step.seed,
                anchor=executor.anchor,
                reduced=reduced,
            )
        return inputs


class _Bridge(torch.autograd.Function):
    """Represents the whole model in the script's autograd graph; its forward has run already."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Backward,
        marked: list[bool],
        outputs: list[torch.Tensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.devices = [tensor.device for tensor in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value, mark in zip(outputs, marked, strict=True) if not mark))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.call.backward(gradients)
        back = [None if g is None else moved(g, device) for g, device in zip(found, ctx.devices, strict=True)]
        return (None, None, None, None, *back)
