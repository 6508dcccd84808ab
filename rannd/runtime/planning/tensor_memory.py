"""How much memory of a device a rank may fill with tensors: what is there, less what is in use beside them.

On an accelerator it is measured once libraries are loaded and communicators are there. A plan is made before its own
communicators are opened, so a number of them is assumed, each as large as one that was opened (`World.open`).
Fragmentation of torch's allocator is not measured; `mem_margin` is for it.
"""

from __future__ import annotations

import torch

from rannd import log
from rannd.device.identity import is_accelerator
from rannd.device.memory import device_memory
from rannd.device.memory_beside import load_libraries
from rannd.runtime.comm.world import World
from rannd.units import amount

COMMUNICATORS = 8
"""Communicators of a rank that are assumed: for values and gradients with the stage before and with the one after, for
the replicas of its stage, for all ranks, and two with which links are measured."""
STEPS = 64
"""What is not for tensors is rounded up to a part of the device's memory: it differs a little from run to run, and the
rest is part of a plan's key."""


def memory_for_tensors(world: World, *, convolutions: bool) -> int:
    """Bytes of a device that each rank may fill, the least of all ranks. Collective.

    Args:
        world: The ranks.
        convolutions: Whether the model needs the library for convolutions.
    """
    device = world.device
    if not is_accelerator(device):
        room = device_memory(device, world.local_size)
    else:
        workspaces = load_libraries(device, convolutions=convolutions)
        if world.communicator_bytes is None:
            world.open(neighbours(world.size, gradients=False))  # with it, NCCL itself is loaded
            world.open(neighbours(world.size, gradients=True))
        told = world.gather_numbers([torch.accelerator.memory_reserved(device)])  # all have done the above
        held = sum(told[rank][0] for rank in world.mates)
        free, total = torch.accelerator.get_memory_info(device)
        own = workspaces + COMMUNICATORS * (world.communicator_bytes or 0)
        room = share(total, max(total - free - held, 0), own, ranks=len(world.mates))
        world.barrier()  # nobody allocates before all have looked
        log.get("RaNNCModule").debug("Of %s, %s are for tensors of a rank", amount(total), amount(room))
    return min(each for (each,) in world.gather_numbers([room]))


def share(total: int, beside: int, own: int, *, ranks: int) -> int:
    """Bytes for the tensors of one of `ranks` ranks of a device with `total` bytes.

    Args:
        total: Bytes of the device.
        beside: Bytes in use that no rank's allocator holds.
        own: Bytes that each rank will need for other things than tensors.
        ranks: Number of ranks that have the device.
    """
    step = max(total // STEPS, 1)
    taken = -(-(beside + ranks * own) // step) * step
    return max(total - taken, step) // ranks


def neighbours(size: int, *, gradients: bool) -> set[tuple[bool, int, int]]:
    """Pairs of slots (see `World.open`): 0 and 1, 2 and 3, ..; the last two if their number is odd."""
    return {(gradients, min(slot, size - 2), min(slot, size - 2) + 1) for slot in range(0, size, 2) if size > 1}
