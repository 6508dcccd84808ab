"""Says once that all ranks train on the same samples, which a script for one process lets them do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from rannd import log
from rannd.runtime.comm.world import World

MOST_ELEMENTS = 4096
"""Elements of each tensor that are compared."""


def tell_equal_batches(world: World, tensors: Sequence[torch.Tensor], rows: int) -> None:
    """A line of the log if all ranks pass the same mini-batch in the first call. Collective.

    Args:
        world: The ranks.
        tensors: Of this rank's call.
        rows: Number of rows of this rank's.
    """
    alike = world.size > 1 and len(set(world.gather_bytes(_digest(tensors)))) == 1
    if alike and world.rank == 0 and rows > 1:  # a single row is often what a test passes
        log.get("RaNNCModule").info(
            "All ranks have passed the same mini-batch to the first call, so that %d ranks train no faster than one: "
            "give each its own samples, as by DistributedSampler(dataset, pyrannc.get_world_size(), "
            "pyrannc.get_rank()), or RaNNCModule(.., gather_inputs=False) to divide rank 0's",
            world.size,
        )


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.layout is torch.strided and not tensor.is_meta:
            found.update(_bytes(tensor.detach().flatten()[:MOST_ELEMENTS]))
    return found.digest()


def _bytes(values: torch.Tensor) -> bytes:
    return values.to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
