"""Copies of a call's tensors to the device: in one transfer, for which the host does not wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rannd.device.identity import is_accelerator

ALIGNMENT = 64
"""Bytes: a tensor begins at a multiple of this in the buffer."""


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors on a device: those that are there as they are, those of the CPU copied together.

    The script may overwrite its own tensors afterwards, pinned ones, too.
    """
    if not is_accelerator(device):
        return [tensor.to(device) for tensor in tensors]
    return copied(tensors, device, pinned=True)


def copied(tensors: Sequence[torch.Tensor], device: torch.device, *, pinned: bool) -> list[torch.Tensor]:
    """As `to_device`, through a buffer of the host's memory, pinned or not."""
    found = [tensor if _packs(tensor) else tensor.to(device) for tensor in tensors]
    places = [place for place, tensor in enumerate(tensors) if _packs(tensor)]
    starts, end = [], 0
    for place in places:
        starts.append(end)
        end += math.ceil(tensors[place].nbytes / ALIGNMENT) * ALIGNMENT
    if not end:
        return [tensor.to(device) for tensor in found]
    host = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    strides = [_strides(tensors[place]) for place in places]
    for place, start, stride in zip(places, starts, strides, strict=True):
        _part(host, start, tensors[place], stride).copy_(tensors[place].detach())
    # torch keeps pinned memory until the copy from it is done.
    there = host.to(device, non_blocking=pinned, copy=True)
    for place, start, stride in zip(places, starts, strides, strict=True):
        found[place] = _part(there, start, tensors[place], stride)
    return found


def _packs(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes into the buffer."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that `tensor.to(device)` has, on which the graph may depend."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _part(buffer: torch.Tensor, start: int, like: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).as_strided(like.shape, strides)
