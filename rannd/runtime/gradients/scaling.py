"""Multiplies gradients by a number that may still be on the device; rounded as a product with a number of Python's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from rannd.device.reads import moved

Factor: TypeAlias = float | torch.Tensor
"""A number, or a 0-dim float64 tensor, best on the device of the gradients."""

_HALF = (torch.float16, torch.bfloat16)


def scaled(gradient: torch.Tensor, factor: Factor) -> torch.Tensor:
    """A gradient times a factor."""
    if not isinstance(factor, torch.Tensor):
        return gradient * factor
    found = gradient.clone()
    scale_([found], factor)
    return found


def scale_(gradients: Sequence[torch.Tensor], factor: Factor) -> None:
    """Multiply gradients by a factor, in place."""
    if not isinstance(factor, torch.Tensor):
        for gradient in gradients:
            gradient.mul_(factor)
        return
    devices = {gradient.device for gradient in gradients}
    if devices - {factor.device}:  # as where a script clips parameters of several devices at once
        for device in devices:
            scale_([each for each in gradients if each.device == device], moved(factor, device))
        return
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            gradient.mul_(factor.to(gradient.dtype))
        elif gradient.dtype in _HALF:
            # A 0-dim factor would be rounded to half precision first; one with dimensions is multiplied as it is.
            place = gradient if gradient.ndim else gradient.view(1)
            torch.mul(place, factor.float().reshape([1] * place.ndim), out=place)
        else:
            kinds.setdefault(gradient.dtype, []).append(gradient)
    for dtype, each in kinds.items():
        torch._foreach_mul_(each, factor.to(dtype))
