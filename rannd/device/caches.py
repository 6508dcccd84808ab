"""Driving out a device's caches: in a step other parts run before one runs again."""

from __future__ import annotations

import torch

from rannd.device.identity import is_accelerator

LEAST = 32 << 20
"""Bytes that are written at least, unless what a step touches is small: more than the caches of CPUs' cores."""
SMALL = 8 << 20
"""Bytes that are written then: more than a core has for itself. What is in caches that cores share stays there."""

_written: dict[tuple[torch.device, int], torch.Tensor] = {}


def eviction_bytes(device: torch.device, *, small: bool = False) -> int:
    """Bytes to write in order to evict what was used before: twice the L2 cache of an accelerator."""
    if not is_accelerator(device):
        return SMALL if small else LEAST
    return max(2 * int(torch.get_device_module(device).get_device_properties(device).L2_cache_size), LEAST)


def evict(device: torch.device, *, small: bool = False) -> None:
    """Overwrite the caches; `small`: as far as a step does that touches few bytes."""
    size = eviction_bytes(device, small=small)
    if (device, size) not in _written:
        _written[device, size] = torch.zeros(size, dtype=torch.uint8, device=device)
    _written[device, size].add_(1)


def release() -> None:
    """Free the memory that is written."""
    _written.clear()
