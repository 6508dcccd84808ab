"""Stops training at a loss that is NaN; the error says which tensor or operator it came from.

A loss computed by the model has the same value on all ranks, so all of them detect a NaN without communication. Where
values of the device are read late, a NaN is noticed in the next call, when the optimizer has spoiled the parameters:
the error then names the step, but not the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rannd.device.reads import read
from rannd.errors import NotANumberError
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.step import Step
from rannd.runtime.failure.nan_check import Finite, has_nan, is_finite
from rannd.runtime.parameters.ownership import Parameters

NO_LABEL = (
    "all labels of this rank's mini-batch are ignored or masked, and a mean over no elements is NaN; skip such "
    "mini-batches, or set check_nan=off to continue training: their gradients are zero"
)


def check_losses(
    finite: Finite, executor: Executor, step: Step, outputs: Sequence[Any], held: Parameters, model: str
) -> None:
    """Check the losses among the outputs of a training step, as configured by `check_nan`. Collective if one is NaN.

    After a NaN loss, each rank checks its inputs and parameters, and then the result of each operator while the forward
    is run again. It is a warning only if the loss is infinite, or under autocast to float16, because a GradScaler skips
    such a step.

    Raises:
        NotANumberError: A loss is NaN.
    """
    if not finite.losses:
        return
    losses = _losses(executor, outputs)
    if executor.world.reads.late:
        _check_later(finite, executor, step, losses, model)
        return
    wrong = next((name for name, value in losses.items() if has_nan(value)), None)
    if wrong is None:
        endless = next((name for name, value in losses.items() if not is_finite(value)), None)
        if endless is not None:
            finite.warn(f"the model's loss {endless} is infinite")
        return
    text = f"the model's loss {wrong} is NaN"
    if executor.bound.graph.signature.mode.float16:
        finite.warn(f"{text}; a GradScaler skips this step")
        return
    for name, value in _stage_tensors(executor, step, held).items():
        if has_nan(value):
            raise NotANumberError(
                f"{text}, because {name} of this rank contains NaN (check_nan=off continues training)"
            )
    if bool(read(executor.mini_batch.counts_no_label(step))):
        raise NotANumberError(f"{text}, because {NO_LABEL}")
    with finite.looking_at_every_operator():
        executor.forward(Step(step.number, step.pieces, step.leaves, whole=step.whole), reduce=False)
        executor.world.barrier()  # a rank that finds nothing must not raise before the rank that does
    raise NotANumberError(
        f"{text}, but no operator returned a NaN when the step was run again: check the inputs, and what the model "
        "modifies in forward (check_nan=off continues training)"
    )


def _check_later(
    finite: Finite, executor: Executor, step: Step, losses: Mapping[str, torch.Tensor], model: str
) -> None:
    """Have the losses of a step checked in the next one, which may be another model's: errors name the class."""
    if not losses:
        return
    names, float16 = list(losses), executor.bound.graph.signature.mode.float16
    flags = [torch.stack([value.isnan().any(), ~value.isfinite().all()]) for value in losses.values()]

    def use(found: Sequence[float]) -> None:
        no_label, *told = found
        wrong = next((name for name, is_nan in zip(names, told[::2], strict=True) if is_nan), None)
        endless = next((name for name, is_endless in zip(names, told[1::2], strict=True) if is_endless), None)
        if wrong is None:
            if endless is not None:
                finite.warn(f"the model's loss {endless} was infinite in {place}")
            return
        text = f"the model's loss {wrong} was NaN in {place}"
        if float16:
            finite.warn(f"{text}; a GradScaler skips such a step")
        elif no_label:
            raise NotANumberError(f"{text}, because {NO_LABEL}")
        else:
            raise NotANumberError(
                f"{text}, and optimizer steps since then have spoiled the parameters: start again from a checkpoint; "
                "with check_nan=all the error names the operator that made the NaN (check_nan=off continues training)"
            )

    place = f"step {step.number} of {model}"
    executor.world.reads.add(torch.cat([executor.mini_batch.counts_no_label(step).reshape(1), *flags]), use)


def _losses(executor: Executor, outputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Scalar outputs that require gradients, by name; the same on all ranks."""
    graph = executor.bound.graph
    return {
        f"(output {place} of its forward, {node.name})": outputs[place]
        for place, (node, result) in enumerate(zip(graph.traced.results, graph.results, strict=True))
        if result.kind == "global" and node in graph.placement.requires_grad
    }


def _stage_tensors(executor: Executor, step: Step, held: Parameters) -> Mapping[str, torch.Tensor]:
    """Inputs and parameters of this rank's stage, by name."""
    specs = executor.bound.graph.signature.tensors
    inputs = {f"input {spec.name}": leaf for spec, leaf in zip(specs, step.leaves, strict=True)}
    return {**inputs, **{f"parameter {name}": held.tensors[name] for name in held.own}}
