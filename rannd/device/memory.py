"""Memory of devices, in bytes."""

from __future__ import annotations

import ctypes

import psutil
import torch

from rannd.device.identity import is_accelerator


def device_memory(device: torch.device, local_size: int) -> int:
    """Bytes of memory of a rank: its GPU's, or an equal share among `local_size` ranks of its node's (or cgroup's)."""
    if is_accelerator(device):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total // local_size


def free_memory(device: torch.device) -> tuple[int, int]:
    """Current (free, total) bytes of a device's memory; of the machine's memory for the CPU.

    What torch's allocator holds without using it counts as free.
    """
    if is_accelerator(device):
        free, total = torch.accelerator.get_memory_info(device)
        held = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + held, total
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def used_memory(device: torch.device) -> int:
    """Bytes of this process: the most that tensors have had on an accelerator, its resident memory on the CPU."""
    if is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def release_unused(device: torch.device) -> None:
    """Give back what torch's allocator holds without using it."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def trim_heap() -> None:
    """Give back what malloc holds without using it, which `rannc-run` lets it keep; of glibc alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
