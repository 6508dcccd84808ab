"""Driving out a device's caches: in a step other parts run before one runs again."""

from __future__ import annotations

import torch

from rannd.device.identity import is_accelerator

LEAST = 32 << 20
"""Bytes that are written at least: more than the caches of CPUs' cores."""

_written: dict[torch.device, torch.Tensor] = {}


def eviction_bytes(device: torch.device) -> int:
    """Bytes to write in order to evict what was used before: twice the L2 cache of an accelerator."""
    if not is_accelerator(device):
        return LEAST
    return max(2 * int(torch.get_device_module(device).get_device_properties(device).L2_cache_size), LEAST)


def evict(device: torch.device) -> None:
    """Overwrite the caches."""
    if device not in _written:
        _written[device] = torch.zeros(eviction_bytes(device), dtype=torch.uint8, device=device)
    _written[device].add_(1)


def release() -> None:
    """Free the memory that is written."""
    _written.clear()
