"""Memory of the device that a rank computes on: what is free, and byte counts as text."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a device's memory, as they are now; of the machine's for the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def amount(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{int(count)} bytes"
