"""Which ranks ask whether a collective is done before they sleep."""

from __future__ import annotations

import pytest

from rannd.runtime.transport.host_wait import suffices


@pytest.mark.parametrize(
    ("mine", "everyone", "enough"),
    [
        ([0], [[0]], True),
        ([0], [[0], [1]], True),  # each rank is bound to a processor of its own
        ([0, 1], [[0, 1], [2, 3]], True),
        ([0, 1], [[0, 1], [0, 1]], True),
        ([0, 1], [[0, 1]] * 3, False),
        ([0], [[0], [0]], False),  # as in a container with one processor
        ([0], [[0], [0, 1]], False),  # one of them may be on the other's
        ([0, 1, 2], [[0, 1, 2], [2], [3]], True),
    ],
)
def test_a_rank_asks_where_processors_suffice(mine: list[int], everyone: list[list[int]], enough: bool) -> None:
    assert suffices(mine, everyone) == enough
