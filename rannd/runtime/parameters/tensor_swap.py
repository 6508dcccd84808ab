"""Give a tensor object other contents: the object stays, for optimizers and modules that refer to it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.graph.fingerprint.object_reader import modules_of, walk


def give(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Let `tensor` be what `value` is, also on another device; its class, attributes, hooks and requires_grad stay.

    Returns an object that is what `tensor` was. As torch.utils.swap_tensors, which refuses tensors that somebody refers
    to weakly (an LSTM does that): references to the object are meant to see its new contents here.
    """
    if isinstance(tensor, nn.Parameter):
        other: Any = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        other = value.detach().requires_grad_(tensor.requires_grad)
    kept: torch.Tensor = other
    exchange_below_hooks(tensor, kept)
    return kept


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Let two objects change contents, gradients with them: undoes a `give` with what it returned."""
    torch._C._swap_tensor_impl(one, other)


def exchange_below_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """The same, but the hooks of `tensor` stay its own."""
    here: Any = tensor
    there: Any = other
    there._backward_hooks = here._backward_hooks
    there._post_accumulate_grad_hooks = here._post_accumulate_grad_hooks
    exchange(tensor, other)


@contextlib.contextmanager
def others(tensors: Iterable[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While entered, each tensor is what `make` makes of it; then it is again what it was."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor in tensors:
            given.append((tensor, give(tensor, make(tensor))))
        yield
    finally:
        for tensor, before in given:
            exchange(tensor, before)


def hollow(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of the shape and type of `like`, on the CPU or another device, without memory: all NaN, or zero."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device or "cpu").expand(like.shape)


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that lies as `like` does and reads as zeros, whose memory is only taken where it is written.

    Not ``torch.empty``, which takes memory where deterministic algorithms are wanted.

    UsageError: There are no addresses for it.
    """
    span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    size = span * like.element_size()
    try:
        region = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    except OSError as exc:
        raise UsageError(
            f"there are no addresses for {size} bytes more ({exc}), although a model takes no memory while it is "
            "traced; see `ulimit -v` and /proc/sys/vm/overcommit_memory"
        ) from exc
    return region.view(like.dtype).as_strided(like.shape, like.stride())


def bare(like: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device that lies as `like` does."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes of modules that are no parameters or buffers; in lists, dicts and objects, too."""
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for held in walk(modules_of(model)):
        if issubclass(held.form.kind, torch.Tensor) and id(held.value) not in seen:
            yield held.path, held.value
