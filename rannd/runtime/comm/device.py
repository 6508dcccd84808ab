"""Selects a rank's device and queries its name and memory; formats byte counts."""

from __future__ import annotations

import os

import psutil
import torch

from rannd.errors import LaunchError


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Select a rank's device according to the configuration item `device`. LaunchError if there is no such device."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device=cuda, but torch sees no CUDA device; use device=cpu or a CUDA build of torch")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Backend of torch.distributed for tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_model(device: torch.device) -> str:
    """Name of a device's model, part of the cache key of measured costs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {_cpu_name()} {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return os.uname().machine


def device_memory(device: torch.device, local_size: int) -> int:
    """Bytes of memory of a rank: its GPU's, or an equal share among `local_size` ranks of its node's (or cgroup's)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
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
    """Current (free, total) bytes of a device's memory; of the machine's memory for the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    memory = psutil.virtual_memory()
    return memory.available, memory.total
