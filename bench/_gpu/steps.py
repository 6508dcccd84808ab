"""Steps of several sides in turns; what the device does in a step, and where the host waits for it."""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from _gpu.machine import ROOT, Here

Step = Callable[[], object]
STEADY = 3
"""Steps in which waits are counted."""


def in_turns(here: Here, sides: Mapping[str, Step], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each side, one number a round; the order is reversed every other round, the first dropped.

    The device is waited for before and after the `steps` steps of a side, not between them.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            here.synchronize()
            begun = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            here.synchronize()
            times[name].append((time.perf_counter() - begun) / steps)
    return {name: values[1:] for name, values in times.items()}


def spread(values: list[float]) -> str:
    """Median and range of seconds, in milliseconds."""
    return f"{1e3 * statistics.median(values):.2f} ms ({1e3 * min(values):.2f} to {1e3 * max(values):.2f})"


def ratio(first: list[float], second: list[float]) -> tuple[float, str]:
    """Median of the ratios of each round, and their range."""
    ratios = sorted(one / other for one, other in zip(first, second, strict=True))
    return statistics.median(ratios), f"{ratios[0]:.3f} to {ratios[-1]:.3f} over {len(ratios)} rounds"


def device_seconds(here: Here, step: Step) -> float:
    """Seconds of a step in which the device computes or copies: the union of what the profiler has seen."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    here.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEADY):
            step()
        here.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in profile.events() if e.device_type == on_device and not e.is_user_annotation]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy = reached = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6 / STEADY


def waits(step: Step) -> Counter[str]:
    """Places in which the host has waited for the device in `STEADY` steps: file, line, and how often.

    torch warns of operations that wait (reads of values, copies to unpinned memory). It attributes those in backward
    to the line that started backward.
    """
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(STEADY):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told = [each for each in caught if "called a synchronizing" in str(each.message)]
    return Counter(f"{_short(each.filename)}:{each.lineno}" for each in told)


def reads(step: Step) -> int | None:
    """Blocking device reads of rannd in `STEADY` steps; None if it does not count them."""
    try:
        count = importlib.import_module("rannd.device.reads").count
    except ModuleNotFoundError:
        return None
    before = count()
    for _ in range(STEADY):
        step()
    return int(count() - before)


def _short(name: str) -> str:
    path = Path(name)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return "/".join(path.parts[-3:])
