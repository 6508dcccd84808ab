"""The device that a rank computes on: which it is, what it is called, how much memory it has; byte counts as text."""

from __future__ import annotations

import os

import psutil
import torch

from rannd.errors import LaunchError


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank, as the configuration item `device` wants it. LaunchError where there is no such device."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device=cuda, but torch sees no CUDA device; use device=cpu or a CUDA build of torch")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed that moves tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_model(device: torch.device) -> str:
    """What kind of device this is, for keys of measured costs."""
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
    """Bytes of memory of a rank: its GPU's, or its share of the node's (and its cgroup's) among `local_size` ranks."""
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
