"""Which device a rank has: chosen by its place on the node, and told apart from those of other ranks."""

from __future__ import annotations

import os

import torch

from rannd.errors import LaunchError

CUDA = "cuda"
"""Device type of NVIDIA's GPUs (and of AMD's in ROCm builds of torch)."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_accelerator() -> bool:
    """Whether torch sees a CUDA device."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == CUDA


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device is queued on streams."""
    return device.type == CUDA


def accelerator_is_used() -> bool:
    """Whether this process has initialized CUDA: a fork of it cannot use a GPU."""
    return bool(torch.cuda.is_initialized())


def is_usable(device: torch.device) -> bool:
    """Whether this process can compute on such a device."""
    return not is_accelerator(device) or has_accelerator()


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Select a rank's device according to the configuration item `device`, and make it the current one.

    A process that sees a single device (Slurm's ``--gpus-per-task``, a container) gets that one.

    Raises:
        LaunchError: There is no such device.
    """
    if wanted == CUDA and not has_accelerator():
        raise LaunchError("device=cuda, but torch sees no CUDA device; use device=cpu or a CUDA build of torch")
    if wanted == "cpu" or not has_accelerator():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(CUDA, index)


def device_identity(device: torch.device) -> str:
    """Return what is equal for two ranks of a node if, and only if, they have the same device; '' for the CPU.

    This is the UUID, as the index of a device is 0 in each process that sees only its own. Parts of a GPU (MIG) have
    its UUID, but can only be seen by their names.
    """
    if not is_accelerator(device):
        return ""
    name = os.environ.get(_VISIBLE, "").split(",")[0].strip()
    if name.startswith("MIG-"):
        return name
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def device_model(device: torch.device) -> str:
    """Name of a device's model, part of the cache key of measured costs."""
    if is_accelerator(device):
        return str(torch.get_device_module(device).get_device_name(device))
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
