"""The segments that recompute, against all possible ones."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest

from rannd.plan.stage_costs.recompute import MOST_BOUNDS, DividedStage, Table, least_memory, segments


def tables(random: Random, count: int, *, equal: bool = False) -> tuple[Table, Table, Table]:
    """(forward, activation, handed) of random blocks: each value has a maker and readers behind it."""
    forward = np.array([1.0 if equal else random.randint(1, 20) for _ in range(count)])
    own = [10.0 if equal else random.randint(0, 30) for _ in range(count)]
    values = [(maker, random.randint(maker + 1, count - 1), random.randint(1, 6)) for maker in range(count - 1)]
    if equal:
        values = [(maker, maker + 1, 1) for maker in range(count - 1)]
    activation, handed = np.zeros((count + 1, count + 1)), np.zeros((count + 1, count + 1))
    for start, end in itertools.combinations(range(count + 1), 2):
        activation[start, end] = sum(own[start:end])
        handed[start, end] = sum(size for maker, last, size in values if start <= maker < end <= last)
    return forward, activation, handed


def every(forward: Table, activation: Table, handed: Table) -> list[DividedStage]:
    count, found = len(forward), []
    for borders in itertools.product((False, True), repeat=count - 1):
        ends = (*(at + 1 for at, border in enumerate(borders) if border), count)
        starts = (0, *ends[:-1])
        for again in itertools.product((False, True), repeat=len(ends)):
            listed = list(zip(starts, ends, again, strict=True))
            found.append(
                DividedStage(
                    ends,
                    again,
                    sum(handed[s, e] + (0 if a else activation[s, e]) for s, e, a in listed),
                    max(activation[s, e] if a else 0 for s, e, a in listed),
                    sum(forward[s:e].sum() for s, e, a in listed if a),
                )
            )
    return found


@pytest.mark.parametrize("seed", range(40))
def test_they_take_the_least_time_of_all_that_fit(seed: int) -> None:
    random = Random(seed)
    given = tables(random, random.randint(1, 6))
    assert len(np.unique(given[1])) <= MOST_BOUNDS
    flying = random.randint(1, 4)
    possible = every(*given)
    sizes = sorted({each.bytes(flying) for each in possible})
    for budget in (*sizes[:: max(len(sizes) // 12, 1)], sizes[0] - 0.5):
        found = segments(*given, flying, budget)
        wanted = min((each.forward_us for each in possible if each.bytes(flying) <= budget), default=None)
        assert (None if found is None else found.forward_us) == wanted
        if found is not None:
            assert found.bytes(flying) <= budget
            assert found in possible


def test_plenty_of_memory_recomputes_nothing() -> None:
    given = tables(Random(1), 6)
    found = segments(*given, 3, 1e9)
    assert found is not None
    assert (found.again, found.forward_us, found.working) == ((False,), 0.0, 0.0)


def test_the_least_memory_is_that_of_blocks_apart_or_together() -> None:
    given = tables(Random(1), 12, equal=True)
    assert least_memory(*given, 1).ends == tuple(range(1, 13))  # 11 values between them and one block
    assert least_memory(*given, 1).bytes(1) == 21
    assert least_memory(*given, 20).ends == (12,)


def test_many_blocks_take_little_time() -> None:
    forward, activation, handed = tables(Random(2), 32)
    most = activation[0, 32]
    found = [segments(forward, activation, handed, 4, 4 * most * share) for share in (0.9, 0.7, 0.5, 0.3)]
    times = [math.inf if each is None else each.forward_us for each in found]
    assert times == sorted(times)
    assert 0 < times[0] < 0.25 * forward.sum()
