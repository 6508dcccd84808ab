"""Measures the memory of tensors during a step with torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def lying_and_peak(step: Callable[[], Any], wrapped: Any, optimizer: Any) -> tuple[int, int]:
    """(bytes of parameters, buffers and optimizer state before `step`, peak bytes during it) of this rank."""
    import torch

    held = [*wrapped.parameters(own=True), *wrapped.buffers(own=True)]
    held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    base = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return base, base + most
