"""GPT-2 in bfloat16 on one rank, in turns with eager PyTorch and torch.compile, and what a step waits for."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from _gpu import steps
from _gpu.machine import Here, variables
from _gpu.models import gpt2
from _gpu.record import Check, Result, at_least, at_most, raised
from rannd.runtime.compiling import compiler

EAGER, RANND, COMPILED, BLOCKS = "eager PyTorch", "rannd", "torch.compile", "rannd, compiled blocks"
MOST_TIME, LEAST_SPEED = 1.05, 0.98
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT-2 and its mini-batch."""

    name: str
    layers: int
    width: int
    words: int
    rows: int
    length: int
    rounds: int
    steps: int
    """Of each side in a round."""


SIZES = (
    Size("GPT-2 12x768", 12, 768, 50257, 16, 1024, rounds=8, steps=6),
    Size("GPT-2 24x1024", 24, 1024, 50257, 8, 1024, rounds=8, steps=6),
)
SMALL = (Size("GPT-2 2x32", 2, 32, 128, 2, 16, rounds=2, steps=1),)


def checks(here: Here) -> list[Check]:
    """All checks of this part; those that need a compiler come last."""
    sizes = SMALL if here.small else SIZES
    plain = [(size.name, functools.partial(_measure, here, size, (EAGER, RANND))) for size in sizes]
    return plain + [
        (f"{size.name}, compiled", functools.partial(_measure, here, size, (COMPILED, BLOCKS))) for size in sizes
    ]


def _measure(here: Here, size: Size, names: Sequence[str]) -> Iterator[Result]:
    """These sides are there at the same time, and measured in turns; one that fails does not keep the other from it."""
    import pyrannc

    backend = "inductor"
    if here.small:
        # On a CPU the compiler takes longer than all else here; what is around it is the same.
        backend = compiler.BACKEND = "aot_eager"
    wraps: dict[str, Callable[[Any, Any], Any]] = {
        EAGER: lambda model, _: model,
        RANND: _wrapped,
        COMPILED: lambda model, _: torch.compile(model, backend=backend),
        BLOCKS: functools.partial(_wrapped, COMPILE_STAGES="blocks"),
    }
    sides: dict[str, steps.Step] = {}
    try:
        for name in names:
            try:
                sides[name], seconds, loss = _begin(here, size, wraps[name])
            except Exception as exc:
                yield raised(f"{size.name}, {name}: the first steps", exc)
                continue
            yield Result(f"{size.name}, {name}: until the first steps end", None, seconds, "s", note=f"loss {loss:.4f}")
        times = steps.in_turns(here, sides, size.rounds, size.steps)
        yield from _compared(here, size, times)
        for name in sides:
            yield from _waited(here, size, name, sides[name])
        if not here.small:
            for name, step in sides.items():
                share = steps.device_seconds(here, step) / sorted(times[name])[len(times[name]) // 2]
                yield Result(f"{size.name}, {name}: share of a step in which the device is busy", None, share)
    finally:
        sides.clear()
        pyrannc.clear()
        torch.compiler.reset()
        gc.collect()
        torch.accelerator.empty_cache() if not here.small else None


def _wrapped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **plan: str) -> Any:
    import pyrannc

    with variables(**plan):
        return pyrannc.RaNNCModule(model, optimizer)


def _begin(here: Here, size: Size, wrap: Callable[[Any, Any], Any]) -> tuple[steps.Step, float, float]:
    """A side's step, after some of them; the seconds these took, and the loss of the last."""
    torch.manual_seed(0)
    inner = gpt2(size.layers, size.width, size.words, size.length).to(here.device)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=True)
    model = wrap(inner, optimizer)
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.words, (size.rows, size.length), generator=drawn).to(here.device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(here.device.type, dtype=torch.bfloat16):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    begun = time.perf_counter()
    for _ in range(WARM_UP):
        loss = step()
    last = float(loss.detach())
    return step, time.perf_counter() - begun, last


def _compared(here: Here, size: Size, times: dict[str, list[float]]) -> Iterator[Result]:
    judged = not here.small
    for name, values in times.items():
        rate = size.rows * size.length / sorted(values)[len(values) // 2]
        yield Result(f"{size.name}, {name}: a step", None, steps.spread(values), note=f"{rate:,.0f} tokens/s")
    if {RANND, EAGER} <= times.keys():
        found, note = steps.ratio(times[RANND], times[EAGER])
        yield at_most(f"{size.name}, {RANND}: step / eager's", found, MOST_TIME, note=note, judged=judged)
        found, note = steps.ratio(times[EAGER], times[RANND])
        medium = size.name == SIZES[-1].name
        name = f"{size.name}, {RANND}: throughput / eager PyTorch's"
        yield at_least(name, found, LEAST_SPEED, note=note, judged=judged and medium)
    if {COMPILED, BLOCKS} <= times.keys():
        found, note = steps.ratio(times[COMPILED], times[BLOCKS])
        name = f"{size.name}, compiled blocks: throughput / torch.compile's"
        yield at_least(name, found, LEAST_SPEED, note=note, judged=judged)


def _waited(here: Here, size: Size, name: str, step: steps.Step) -> Iterator[Result]:
    """Waits in a step; those of PyTorch alone are not judged."""
    ours = name in (RANND, BLOCKS)
    if not here.small:
        places = steps.waits(step)
        note = ", ".join(f"{place} {count}x" for place, count in places.most_common(8))
        count = sum(places.values()) / steps.STEADY
        yield at_most(f"{size.name}, {name}: synchronisations in a step", count, 1, note=note, judged=ours)
    if ours:
        found = steps.reads(step)
        if found is None:
            yield Result(f"{size.name}, {name}: device reads in a step", None, "not counted")
        else:
            note = "a CPU computes at once: what it reads is used in the same step" if here.small else ""
            name = f"{size.name}, {name}: device reads in a step"
            yield at_most(name, found / steps.STEADY, 1, note=note, judged=not here.small)
