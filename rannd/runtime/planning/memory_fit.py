"""Checks on every rank whether a deployment fits into the memory that is free now."""

from __future__ import annotations

import resource

import psutil
from torch import nn

from rannd.device.memory import free_memory
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import fullest_bytes, slot_bytes
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
    return free_room(world) + sum(held.values())


def free_room(world: World) -> int:
    """Bytes of the device that are free for this rank, see `room`."""
    free, _ = free_memory(world.device)
    if world.device.type != "cpu":
        free //= len(world.mates)
    else:
        free = min(free, _cgroup_free(free)) // world.local_size
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            free = min(free, most - psutil.Process().memory_info().vms)
    return max(0, free)


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


def short_of_change(world: World, deployment: Deployment, following: Deployment) -> tuple[int, int] | None:
    """Find the rank with the least memory for a change of the plan: (bytes needed, free). None if all have enough.

    An undeployed rank has the whole model: parameters, gradients and optimizer's state of all stages, beside those of
    its own. Then the `following` plan has to fit, where parameters of the whole model count as free, see `room`. On an
    accelerator the host has to have room as well, as parameters go back to where they were. Collective.
    """
    states, parameters = [], 0
    for stage in deployment.stages:
        own = stage.estimate
        divided = [(own.optimizer_bytes, 1), (own.grad_bytes, 2), (own.param_bytes, 3)]  # from which ZeRO stage on
        replicas = len(stage.slots)
        states += [nbytes * (replicas if deployment.zero >= first else 1) for nbytes, first in divided]
        states.append(own.offloaded_bytes)
        parameters += own.param_bytes * (replicas if deployment.zero >= divided[2][1] else 1)
    need = sum(states) + max(0, fullest_bytes(following) - parameters)
    there = min(free_room(world), psutil.virtual_memory().available // world.local_size)
    least = min(each for (each,) in world.gather_numbers([there]))
    return (need, least) if need > least else None


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
