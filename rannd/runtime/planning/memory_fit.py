"""Checks on every rank whether a deployment fits into the memory that is free now."""

from __future__ import annotations

import resource

import psutil
from torch import nn

from rannd.device.memory import free_memory
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import slot_bytes
from rannd.runtime.comm.world import World

BITS = 4
"""Number of significant bits of memory limits; rounding limits keeps the number of different cached plans small."""


def room(world: World, model: nn.Module) -> int:
    """Bytes that this rank's stages may use: free memory, and memory that the model already uses on the device.

    Ranks of one node share its memory, and ranks that have one accelerator the accelerator's. Limits of the cgroup and
    the process (RLIMIT_AS) are respected.
    """
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *model.buffers()]
        if tensor.device.type == world.device.type
    }
    free, _ = free_memory(world.device)
    if world.device.type != "cpu":
        free //= len(world.mates)
    else:
        free = min(free, _cgroup_free(free)) // world.local_size
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            free = min(free, most - psutil.Process().memory_info().vms)
    return max(0, free) + sum(held.values())


def short(world: World, model: nn.Module, deployment: Deployment) -> tuple[int, int, int] | None:
    """Find the rank that lacks most memory: (rank, bytes its stages need, bytes available), None if all fit.

    Collective.
    """
    here = room(world, model)
    told = world.gather_numbers([slot_bytes(deployment, world.slot), here])
    lacking = [(need - there, rank) for rank, (need, there) in enumerate(told) if need > there]
    if not lacking:
        return None
    _, rank = max(lacking)
    return rank, told[rank][0], told[rank][1]


def lower_limit(there: int, margin: float) -> int:
    """Memory limit for planning again if only `there` bytes are available; `margin` is the fraction to keep free."""
    limit = int(there * (1 - margin))
    dropped = max(limit.bit_length() - BITS, 0)
    return max(limit >> dropped << dropped, 1)


def _cgroup_free(otherwise: int) -> int:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            most = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as file:
            cached = next((int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):
        return otherwise
    return int(most) - used + cached if most.isdigit() else otherwise
