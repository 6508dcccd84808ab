"""Checks and hints for common mistakes in calling a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rannd.errors import TraceError, UsageError
from rannd.graph.call.signature import Signature
from rannd.graph.call.unread import is_unread

MOST_NOTES = 3


def check_ready(model: nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """UsageError if the model has uninitialized lazy parameters, or only the tensors are on the meta device."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"parameter {lazy[0]} of the model has no shape yet (a lazy module); call the model once with a small "
            "batch before it is wrapped, and make the optimizer after that"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_meta and devices - {"meta"}:
            raise UsageError(
                f"{name} of the model is on the meta device, which holds no values, and the model is on "
                f"{', '.join(sorted(devices))}; make the tensor on the CPU, or on the model's device"
            )


def check_values(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """UsageError if a tensor of a call that is to be executed is on the meta device."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_meta:
            raise UsageError(
                f"{name} of the model is on the meta device, which holds no values; with those the model can be "
                "planned (partitioning_dry_run_np=NUMBER_OF_DEVICES), but not called: make the tensor on the CPU"
            )


@contextlib.contextmanager
def explained(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context manager that appends hints about likely mistakes in the call to a TraceError.

    Tracing uses another number of rows than the call, so the model's own message may mention sizes that the user has
    never seen.
    """
    try:
        yield
    except TraceError as exc:
        notes = _notes(model, signature, tensors)
        if not notes:
            raise
        raise TraceError(f"{str(exc).rstrip('.')}. Note: {'; '.join(notes[:MOST_NOTES])}") from exc


def _notes(model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]) -> list[str]:
    rows = signature.rows(tensors)
    batch = next((spec.name for spec in signature.tensors if spec.batch), "")
    found = [
        f"{spec.name} has {tensor.shape[0]} rows and {batch} has {rows}: tensors with another number of rows "
        "than the batch are not split, but passed whole to every microbatch"
        for spec, tensor in zip(signature.tensors, tensors, strict=True)
        if not spec.batch and tensor.ndim
    ]
    found += [
        f"{name} is a list of {rows} numbers, which are the same for all samples; if it has one for each sample, make "
        "a tensor of it, torch.tensor(x)"
        for name in numbers_by_row(signature, rows)
    ]
    homes = {parameter.device: name for name, parameter in model.named_parameters()}
    if len(homes) > 1:
        told = ", ".join(f"{name} on {device}" for device, name in homes.items())
        found.append(f"parameters are on several devices: {told}; move the whole model to one, model.to(device)")
    return found


def numbers_by_row(signature: Signature, rows: int) -> list[str]:
    """Names of arguments that are lists with one number per row of the batch, so probably meant per sample."""
    return [name for name, value in _named_arguments(signature) if rows > 1 and len(value) == rows]


def _named_arguments(signature: Signature) -> Iterator[tuple[str, list[Any] | tuple[Any, ...]]]:
    """Yield (name, value) of top-level arguments that are lists or tuples of numbers."""
    args, kwargs = signature.unflatten([None] * len(signature.tensors))
    for name, value in [*((f"argument {place}", each) for place, each in enumerate(args)), *kwargs.items()]:
        if is_unread(value):
            continue
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, (int, float)) for each in value):
            yield name, value
