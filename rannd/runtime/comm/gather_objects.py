"""Gathers tensors and errors from the ranks.

Tensors of any dtype are sent one at a time, as bytes, through the CPU on the control group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from rannd.errors import RanndError
from rannd.runtime.comm.world import World

Error = TypeVar("Error", bound=RanndError)


def collect(
    world: World,
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    holder: int,
    *,
    everywhere: bool,
) -> torch.Tensor | None:
    """Copy rank `holder`'s tensor to the CPU of rank 0 (with `everywhere`, of all ranks). Collective.

    Only rank `holder` passes the tensor; the others pass its shape and dtype. Returns None on ranks without a copy.
    """
    mine: torch.Tensor | None = None
    if world.rank == holder:
        assert tensor is not None
        kept = everywhere or holder == 0
        mine = tensor.detach().to("cpu", copy=kept).contiguous()
    elif everywhere or world.rank == 0:
        mine = torch.empty(tuple(shape), dtype=dtype)
    if mine is not None and mine.numel():
        data = mine.reshape(-1).view(torch.uint8)
        with world.watch.inside("gather"):
            if everywhere and world.size > 1:
                dist.broadcast(data, holder, group=world.control)
            elif holder != 0 and world.rank == holder:
                dist.send(data, 0, group=world.control)
            elif holder != 0 and world.rank == 0:
                dist.recv(data, holder, group=world.control)
    return mine if everywhere or world.rank == 0 else None


def agree_on_errors(
    world: World, error: str, raised: type[Error], hint: str = "", outcome: str = "nothing was changed on any"
) -> None:
    """Raise `raised` on all ranks if some rank passes an `error` that is not ''. Collective."""
    texts = [data.decode() for data in world.gather_bytes(error.encode())]
    wrong = [rank for rank, text in enumerate(texts) if text]
    if not wrong:
        return
    text = error or f"rank {wrong[0]}: {texts[wrong[0]]}"
    if len(wrong) < world.size:
        text += f" (on rank {', '.join(map(str, wrong))} of {world.size}; {outcome}){hint}"
    raise raised(text)
