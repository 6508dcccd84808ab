"""The planner's estimates of a step's time and memory, beside what is measured, on one rank.

A step is the forward call and backward, as in bench/estimates.py; memory is that of tensors at its peak, parameters and
optimizer included. Models are wrapped one after the other, so that memory is theirs.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _estimated_models import GPU, TINY, models
from _tensor_bytes import lying_and_peak
from torch import nn

from _gpu.machine import Here, variables
from _gpu.record import Check, Result

PLANS = {
    "m 1": {"PIPELINE_NUM": "1"},
    "m 4": {"PIPELINE_NUM": "4"},
    "m 4, recompute": {"PIPELINE_NUM": "4", "CHECKPOINTING": "true"},
}
OFF = 0.15
"""Largest relative error."""


def checks(here: Here) -> list[Check]:
    """All checks of this part."""
    listed: list[Check] = []
    for name, make, arguments, whole in models(TINY if here.small else GPU):
        for plan, forced in PLANS.items():
            if not whole or plan == "m 1":
                check = functools.partial(_measure, here, f"{name}, {plan}", make, arguments, forced)
                listed.append((f"{name}, {plan}", check))
    return listed


def _measure(
    here: Here, name: str, make: Callable[[], nn.Module], arguments: tuple[Any, ...], plan: dict[str, str]
) -> Iterator[Result]:
    import pyrannc

    pyrannc.clear()
    gc.collect()
    before = 0 if here.small else torch.accelerator.memory_allocated(here.device)
    torch.manual_seed(0)
    given = [each.to(here.device) for each in arguments]
    inner = make().to(here.device)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-5)
    with variables(**plan), torch.autocast(here.device.type, dtype=torch.bfloat16, enabled=not here.small):
        wrapped = pyrannc.RaNNCModule(inner, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            wrapped(*given).backward()

        for _ in range(3):  # the second and third make gradients and optimizer state as in all later steps
            step()
            optimizer.step()
        times = _times(here, step, 3 if here.small else 30)
        peak = _peak(here, step, wrapped, optimizer, before)
    planned = sum(stage.estimate.total_bytes for stage in wrapped.deployment.stages)
    (low, middle, high), predicted = statistics.quantiles(times, n=4), wrapped.deployment.step_us
    measured = f"{1e3 * middle:.2f} ms measured, {predicted / 1e3:.2f} ms predicted"
    note = f"half of the interquartile range {(high - low) / 2 / middle:.3f}"
    yield _judged(here, f"{name}: time / estimate", 1e6 * middle / predicted, f"{measured}, {note}")
    mib = 2**20
    yield _judged(
        here, f"{name}: memory / estimate", peak / planned, f"{peak / mib:.0f} MiB used, {planned / mib:.0f} planned"
    )


def _times(here: Here, step: Callable[[], None], count: int) -> list[float]:
    """Seconds of single steps; the device is waited for around each."""
    times = []
    for _ in range(count):
        here.synchronize()
        begun = time.perf_counter()
        step()
        here.synchronize()
        times.append(time.perf_counter() - begun)
    return times


def _peak(here: Here, step: Callable[[], None], wrapped: Any, optimizer: torch.optim.Optimizer, before: int) -> int:
    """Peak bytes of tensors in a step, without those that were there before the model."""
    if here.small:
        _, peak = lying_and_peak(step, wrapped, optimizer)
        return peak
    torch.accelerator.reset_peak_memory_stats(here.device)
    step()
    here.synchronize()
    return torch.accelerator.max_memory_allocated(here.device) - before


def _judged(here: Here, name: str, ratio: float, note: str) -> Result:
    ok = abs(ratio - 1) <= OFF
    return Result(name, None if here.small else ok, ratio, limit=f"1 within {OFF:.0%}", note=note)
