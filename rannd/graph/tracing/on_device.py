"""Trace and run a model as on the device of its job, wherever its tensors are.

What a model computes depends on the device: under autocast of CUDA, `linear` gives bfloat16 for CUDA tensors and
float32 for those of the CPU, and ``x.device`` ends up in the graph. So export sees the model's tensors and the
arguments of the call on the job's device. It needs their metadata only, so that nothing is moved, and no such device is
needed. What is on the CPU by the model's own will stays there: constants, ``x.cpu()``, ``torch.zeros(3)``.

Code that cannot be exported has to run, for which the model is moved to the device for a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber

from rannd.device.identity import is_accelerator, is_usable
from rannd.errors import TraceError
from rannd.patches import declare, patched

_DESCRIBED = declare(
    "metadata of tensors",
    MetaTensorDescriber,
    "describe_tensor",
    "export sees tensors on the device that they are on, and has to see them on the job's",
)


@contextlib.contextmanager
def seen_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let torch.export see these tensors, and views of their memory, on `device`.

    Of a model that is on the meta device as a whole, constants are seen there as well. Where only some parameters are
    on the meta device, these stay there: the model would fail without tracing, too.
    """
    tensors = list(tensors)
    lost = len({tensor.is_meta for tensor in tensors if isinstance(tensor, nn.Parameter)}) > 1
    elsewhere = [
        tensor
        for tensor in tensors
        if tensor.device.type != device.type and tensor.layout is torch.strided and not (lost and tensor.is_meta)
    ]  # they keep their storages alive, whose addresses are compared
    bare = any(tensor.is_meta for tensor in elsewhere)
    memory = {tensor.untyped_storage()._cdata for tensor in elsewhere}

    def described(original: Callable[..., Any], describer: Any, tensor: torch.Tensor, **options: Any) -> Any:
        found = original(describer, tensor, **options)
        if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
            return found
        if tensor.untyped_storage()._cdata in memory or (tensor.is_meta and bare):
            return dataclasses.replace(found, device=device)
        return found

    with patched(*([_DESCRIBED.around(described)] if memory else [])):
        yield


@contextlib.contextmanager
def running_on(device: torch.device, model: nn.Module, why: str = "", *, required: bool = True) -> Iterator[None]:
    """Move a model to `device` for a while; tensors without values (meta device) stay where they are.

    If its memory is not enough, and the device is not `required`, the model runs where it is. `why` it has to run is
    told in errors.

    Raises:
        TraceError: There is no such device in this process, or it has too little memory.
    """
    if not is_usable(device):
        raise TraceError(
            f"the model has code that cannot be traced without running it on {device.type}, and torch sees no such "
            f"device here{why and ': '}{why}"
        )
    state = (*model.parameters(), *model.buffers())
    moved = [(tensor, tensor.data) for tensor in state if tensor.device != device and not tensor.is_meta]
    try:
        try:
            for tensor, data in moved:
                tensor.data = data.to(device)
        except torch.OutOfMemoryError as exc:
            if required:
                raise TraceError(
                    f"the model has code that cannot be traced without running it, and is too large for {device} as a "
                    f"whole; called without autocast, it could run where it is{why and ': '}{why}"
                ) from exc
            for tensor, data in moved:
                tensor.data = data
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data


def home_of(model: nn.Module) -> torch.device | None:
    """Device of a model; None if it has no tensors."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)


def on_host(tensor: torch.Tensor, model: nn.Module) -> bool:
    """Whether a tensor is on the CPU, beside a model on an accelerator."""
    home = home_of(model)
    return tensor.device.type == "cpu" and home is not None and is_accelerator(home)
