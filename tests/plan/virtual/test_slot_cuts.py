"""Cuts for slots with several stages, beside all cuts there are."""

from __future__ import annotations

from itertools import combinations
from random import Random

import msgspec
import numpy as np
import pytest

from rannd.plan.virtual.slot_cuts import SlotCosts, best_cuts, e_of_cuts

V, INTERLEAVED = (0, 1, 1, 0), (0, 1, 0, 1)


def _sums(each: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """One number per block, added up over runs of blocks."""
    ends = np.concatenate([[0.0], np.cumsum(each)])
    return np.triu(ends[None, :] - ends[:, None])


def _costs(random: Random, homes: tuple[int, ...], blocks: int) -> SlotCosts:
    rounds = _sums([random.uniform(1, 9) for _ in range(blocks)])
    moments = {home: random.randint(1, 3) for home in homes}
    held = [[_sums([random.uniform(1, 9) for _ in range(blocks)]) for _ in range(moments[home])] for home in homes]
    largest = [random.uniform(0, 9) for _ in range(blocks)]
    working = np.array(
        [[max(largest[a:b], default=0.0) for b in range(blocks + 1)] for a in range(blocks + 1)], dtype=float
    )
    may = np.array([True, *(random.random() < 0.9 for _ in range(blocks - 1)), True])
    return SlotCosts(homes, random.randint(1, 20), rounds, rounds * random.random(), held, working, np.inf, may)


def _every(costs: SlotCosts) -> list[tuple[float, float]]:
    """E and memory of all cuts."""
    inner = [at for at in range(1, len(costs.rounds) - 1) if costs.may_begin[at]]
    return [e_of_cuts(costs, (0, *cuts)) for cuts in combinations(inner, len(costs.homes) - 1)]


def _by_hand(costs: SlotCosts, starts: tuple[int, ...]) -> tuple[float, float]:
    """E and memory as the formula has them."""
    spans = list(zip(starts, (*starts[1:], len(costs.rounds) - 1), strict=True))
    busy, memory = [], []
    for slot in set(costs.homes):
        own = [stage for stage, home in enumerate(costs.homes) if home == slot]
        busy.append(sum(costs.rounds[spans[stage]] for stage in own))
        moments = range(len(costs.held[own[0]]))
        memory.append(
            max(sum(costs.held[stage][moment][spans[stage]] for stage in own) for moment in moments)
            + max(costs.working[spans[stage]] for stage in own)
        )
    e_us = costs.pieces * max(busy) + max(costs.homes) * max(costs.fill[span] for span in spans)
    return float(e_us), float(max(memory))


@pytest.mark.parametrize("homes", [V, INTERLEAVED, (0, 1, 2, 2, 1, 0), (0, 1, 0, 1, 0, 1, 0, 1)])
def test_the_best_of_all_cuts_is_found_with_any_memory(homes: tuple[int, ...]) -> None:
    fitted = 0
    for seed in range(40):
        costs = _costs(Random(seed), homes, len(homes) + seed % 4)
        every = _every(costs)
        for part in (1.0, 0.6, 0.2, 0.0):
            sizes = sorted(size for _, size in every)
            limit = sizes[int((len(sizes) - 1) * part)] * (1 + 1e-9) if sizes else 1.0
            found = best_cuts(msgspec.structs.replace(costs, limit=limit))
            fitting = [e_us for e_us, size in every if size <= limit]
            if not fitting:
                assert found is None
                continue
            assert found is not None
            fitted += 1
            assert found.exact
            assert found.e_us == pytest.approx(min(fitting))
            assert (found.e_us, found.most_bytes) == pytest.approx(_by_hand(costs, found.starts))
            assert all(costs.may_begin[start] for start in found.starts)
    assert fitted > 100


def test_nothing_fits_too_little_memory_and_too_few_blocks() -> None:
    costs = _costs(Random(0), V, 8)
    assert best_cuts(msgspec.structs.replace(costs, limit=min(size for _, size in _every(costs)) * 0.99)) is None
    assert best_cuts(_costs(Random(0), V, 3)) is None


def test_a_search_that_gives_cuts_up_says_so() -> None:
    random = Random(1)
    homes = tuple(range(4)) * 4
    costs = _costs(random, homes, 40)
    narrow, wide = best_cuts(costs, [2]), best_cuts(costs)
    assert narrow is not None
    assert not narrow.exact
    assert wide is not None
    assert wide.e_us <= narrow.e_us
    mean = costs.pieces * costs.rounds[0, -1] / 4
    assert wide.e_us < 1.25 * mean, "sixteen stages of forty uneven blocks are about as long as each other"


def test_equal_blocks_are_cut_evenly() -> None:
    rounds = _sums([1.0] * 31 + [1.4])
    costs = SlotCosts(
        (0, 1, 2, 3, 3, 2, 1, 0), 16, rounds, rounds, [[rounds]] * 8, rounds * 0, np.inf, np.ones(33, dtype=bool)
    )
    found = best_cuts(costs)
    assert found is not None
    assert found.starts == (0, 4, 8, 12, 16, 20, 24, 28)
