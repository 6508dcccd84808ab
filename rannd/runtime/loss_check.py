"""A NaN among the losses of a training step ends the training, and the error says where it came from.

A loss that the model computes is the same on all ranks, so all of them see it without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rannd.errors import NotANumberError
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.step import Step
from rannd.runtime.failure.nan_check import Finite, has_nan
from rannd.runtime.parameters.ownership import Parameters


def check_losses(finite: Finite, executor: Executor, step: Step, outputs: Sequence[Any], held: Parameters) -> None:
    """Check the losses among the outputs of a training step, as `check_nan` says. Collective where one is NaN.

    The inputs and the parameters of this rank's stage are looked at, and then the results of its operators while the
    step runs again. Under autocast to float16, where a GradScaler skips such a step, it is a warning and no error, and
    so it is for an infinite loss.

    Raises:
        NotANumberError: A loss is NaN.
    """
    if not finite.losses:
        return
    losses = _losses(executor, outputs)
    wrong = next((name for name, value in losses.items() if has_nan(value)), None)
    if wrong is None:
        endless = next((name for name, value in losses.items() if not bool(torch.isfinite(value).all())), None)
        if endless is not None:
            finite.warn(f"the model's loss {endless} is infinite")
        return
    text = f"the model's loss {wrong} is NaN"
    if executor.bound.graph.signature.mode.float16:
        finite.warn(f"{text}; a GradScaler skips this step")
        return
    for name, value in _given(executor, step, held).items():
        if has_nan(value):
            raise NotANumberError(f"{text}, because {name} of this rank holds NaN (check_nan=off continues training)")
    if executor.mini_batch.counts_no_label(step):
        raise NotANumberError(
            f"{text}, because no label of this rank's mini-batch counts (all are ignored or masked), and the mean "
            "over nothing is NaN; skip such mini-batches, or train on with check_nan=off: their gradients are zero"
        )
    with finite.looking_at_every_operator():
        executor.forward(Step(step.number, step.pieces, step.leaves, whole=step.whole), reduce=False)
        executor.world.barrier()  # whose own part is right must not be the first to raise
    raise NotANumberError(
        f"{text}, but no operator made a NaN when the step ran again: look at the inputs, and at what the model "
        "changes while it runs (check_nan=off continues training)"
    )


def _losses(executor: Executor, outputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The scalars that need gradients, by name; all ranks have the same ones."""
    graph = executor.bound.graph
    return {
        f"(output {place} of its forward, {node.name})": outputs[place]
        for place, (node, result) in enumerate(zip(graph.traced.results, graph.results, strict=True))
        if result.kind == "global" and node in graph.placement.requires_grad
    }


def _given(executor: Executor, step: Step, held: Parameters) -> Mapping[str, torch.Tensor]:
    """What this rank's stage computes with: inputs and parameters, by name."""
    specs = executor.bound.graph.signature.tensors
    inputs = {f"input {spec.name}": leaf for spec, leaf in zip(specs, step.leaves, strict=True)}
    return {**inputs, **{f"parameter {name}": held.tensors[name] for name in held.own}}
