"""Plans that are made in advance are those that a job on the other hosts would make."""

from __future__ import annotations

import pytest

from rannd.plan.deployment import Slot
from rannd.runtime.planning.plan_ahead import MOST, next_slots


def _counts(slots: tuple[Slot, ...]) -> list[int]:
    nodes = sorted({slot.node for slot in slots})
    assert nodes == list(range(len(nodes)))
    assert list(slots) == sorted(slots)
    return [sum(slot.node == node for slot in slots) for node in nodes]


def _slots(*counts: int) -> list[Slot]:
    return [Slot(node, device) for node, count in enumerate(counts) for device in range(count)]


@pytest.mark.parametrize(
    ("now", "later"),
    [
        ([1], [[2]]),
        ([2], [[1], [3]]),
        ([4], [[3], [5], [2]]),
        ([2, 2], [[2], [2, 2, 2]]),
        ([8, 8, 8], [[8, 8], [8, 8, 8, 8], [8]]),
        ([4, 8, 4], [[8, 4], [4, 4], [4, 8], [4, 8, 4, 8], [4], [8]]),
    ],
)
def test_hosts_that_may_come_next(now: list[int], later: list[list[int]]) -> None:
    assert [_counts(each) for each in next_slots(_slots(*now))] == later


def test_there_are_not_too_many() -> None:
    assert len(next_slots(_slots(*range(1, 20)))) == MOST
