"""Gathers state from the ranks: whole tensors and other Python values.

Tensors of any dtype are sent one at a time, as bytes, through the CPU on the control group. Other values are sent, and
stored in files, in the format of `seal`, which torch.load reads with weights_only=True: reading runs no code.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rannd.errors import RanndError, UsageError
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


def seal(value: Any, what: str) -> bytes:
    """Serialize a value for `unseal`; UsageError if it could not be read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unseal(buffer.getvalue())
    except Exception as exc:  # pickle raises all kinds of errors
        raise UsageError(
            f"{what} contains an object that cannot be sent or stored safely ({_culprit(value, what)}); use numbers, "
            "strings, bytes, None, lists, tuples, sets, dicts and tensors only"
        ) from exc
    return buffer.getvalue()


def unseal(data: bytes) -> Any:
    """Deserialize a value that `seal` serialized."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _culprit(value: Any, path: str) -> str:
    """Find the object inside a value that cannot be stored; returns its path and type as text."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{place}]", each) for place, each in enumerate(value)]
    for inner, each in items:
        try:
            buffer = io.BytesIO()
            torch.save(each, buffer)
            unseal(buffer.getvalue())
        except Exception:
            return _culprit(each, inner)
    return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"


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
