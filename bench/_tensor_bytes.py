"""Measures the memory of tensors during a step with torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


class LyingBytes(NamedTuple):
    """What this rank has between steps, in bytes."""

    parameters: int
    """With buffers."""
    gradients: int
    optimizer: int


def lying(wrapped: Any, optimizer: Any) -> LyingBytes:
    """The memory of this rank's tensors, or pieces of them; memory that tensors share counts once."""
    return LyingBytes(*(sum(each.values()) for each in regions(wrapped, optimizer).values()))


def regions(wrapped: Any, optimizer: Any) -> dict[str, dict[int, int]]:
    """Address and bytes of this rank's tensors, or pieces of them, by the names of `LyingBytes`."""
    import torch

    from rannd.runtime.parameters.absent import part_of
    from rannd.runtime.zero.tensor_piece import flat_part

    def held(tensors: Iterable[Any]) -> dict[int, int]:
        parts = [flat_part(tensor if (part := part_of(tensor)) is None else part) for tensor in tensors]
        return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parts}

    own = [*wrapped.parameters(own=True)]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": held([*own, *wrapped.buffers(own=True)]),
        "gradients": held(parameter.grad for parameter in own if parameter.grad is not None),
        "optimizer": held(value for value in states if isinstance(value, torch.Tensor)),
    }


def buffer_bytes(wrapped: Any) -> int:
    """Bytes of the message buffers that this rank keeps between steps."""
    free = next(iter(wrapped._session._graphs.executors()))._player._buffers._free  # the same for all
    return sum(buffer.numel() for same in free.values() for buffer in same)


def mapped_files() -> list[range]:
    """Addresses at which this process has files without a name: what is offloaded to them."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith("(deleted)")]
    return [range(int(low, 16), int(high, 16)) for low, high in spans]


def lying_and_peak(step: Callable[[], Any], wrapped: Any, optimizer: Any, *, kept: bool = False) -> tuple[int, int]:
    """(bytes of parameters, buffers and optimizer state before `step`, peak bytes during it) of this rank.

    Gradients do not count before it: the profiler does not see the end of what is older than it. With `kept` they do,
    and `step` has to keep them: ``optimizer.zero_grad(set_to_none=False)``.
    """
    import torch

    if not kept:
        optimizer.zero_grad()
    base = sum(lying(wrapped, optimizer))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return base, base + most
