"""Whole tensors and plain values on their way between ranks, for state that is gathered.

Tensors travel one at a time, as bytes: of any type, on the control group, through the CPU. Values that are not
tensors travel, and lie in files, as `seal` writes them: torch.load with weights_only reads them, which runs no code.
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
    """A copy on the CPU of rank `holder`'s tensor, on rank 0 (or all ranks); None on the others. Collective.

    Only rank `holder` gives the tensor; the others know its shape and type.
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
        if everywhere and world.size > 1:
            dist.broadcast(data, holder, group=world.control)
        elif holder != 0 and world.rank == holder:
            dist.send(data, 0, group=world.control)
        elif holder != 0 and world.rank == 0:
            dist.recv(data, holder, group=world.control)
    return mine if everywhere or world.rank == 0 else None


def seal(value: Any, what: str) -> bytes:
    """A value as bytes that `unseal` reads; UsageError where it holds what could not be read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unseal(buffer.getvalue())
    except Exception as exc:  # pickle raises all kinds of errors
        raise UsageError(
            f"{what} holds what can neither be sent nor stored safely ({_culprit(value, what)}); numbers, strings, "
            "bytes, None, lists, tuples, sets, dicts and tensors can"
        ) from exc
    return buffer.getvalue()


def unseal(data: bytes) -> Any:
    """What was sealed."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _culprit(value: Any, path: str) -> str:
    """Where in a value lies what cannot be stored, and its type."""
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
    """Raise on all ranks what some rank found wrong, '' where it found nothing. Collective."""
    texts = [data.decode() for data in world.gather_bytes(error.encode())]
    wrong = [rank for rank, text in enumerate(texts) if text]
    if not wrong:
        return
    text = error or f"rank {wrong[0]}: {texts[wrong[0]]}"
    if len(wrong) < world.size:
        text += f" (on rank {', '.join(map(str, wrong))} of {world.size}; {outcome}){hint}"
    raise raised(text)
