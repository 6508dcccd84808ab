"""What was not chosen, and why: the plans that people ask about, each at its best."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rannd.plan.deployment import Alternative
from rannd.plan.estimate import StageTables
from rannd.plan.machine import Mask
from rannd.plan.stages import Choice, best_choice

EFFORT = 20_000
"""As of a search, for each of them."""
MOST = 8
"""So many are looked at."""

MakeTables = Callable[[Mask, float, bool], list[StageTables]]
"""Tables of all variants for the replicas that are allowed, bytes of a device, and recomputing everywhere."""


def alternatives(make: MakeTables, chosen: Choice, allowed: Mask, limit: float) -> tuple[Alternative, ...]:
    """Plans of 1, 2, 3 .. stages with equally many replicas, the fastest first, those that do not fit last.

    `allowed`: ``[start, end, replicas - 1]``. What does not fit is told with what it needs if all stages recompute.
    """
    world, blocks = allowed.shape[2], allowed.shape[0] - 1
    counts = [count for count in range(1, min(world, blocks) + 1) if world % count == 0]
    found = []
    for stages in counts[: MOST + 1]:
        replicas = world // stages
        if chosen.replicas == (replicas,) * stages:
            continue
        only = allowed & (np.arange(1, world + 1) == replicas)
        each = _best(make(only, limit, False), stages)
        over = 0
        if each is None:
            each = _best(make(only, math.inf, True), stages)
            if each is None:
                continue  # the model cannot be cut like that
            over = max(math.ceil(each[1] - limit), 1)
        choice, most = each
        step_us = choice.step_us if not over else 0.0
        found.append(Alternative(_name(choice, stages, replicas), step_us, math.ceil(most), over))
    return tuple(sorted(found, key=lambda other: (other.over_bytes, other.step_us))[:MOST])


def _best(tables: list[StageTables], stages: int) -> tuple[Choice, float] | None:
    """The best plan, and the bytes of its fullest device."""
    choice = best_choice(tables, stages=stages, effort=EFFORT).choice
    if choice is None:
        return None
    table = next(table for table in tables if table.variant == choice.variant)
    sizes = [
        table.estimate(start, end, replicas, used=used).total_bytes
        for start, end, replicas, used in choice.spans(table.blocks)
    ]
    return choice, max(sizes)


def _name(choice: Choice, stages: int, replicas: int) -> str:
    if stages == 1:
        return f"{replicas}-way data parallel"
    each = f"{stages} stages x {replicas}" if replicas > 1 else f"{stages} stages"
    return f"{each}, {choice.variant.microbatches} microbatches"
