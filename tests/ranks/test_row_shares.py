"""Rows of a batch for ranks of different speeds, and how they are told."""

from __future__ import annotations

import itertools
import random

import pytest

from rannd.ranks.row_shares import VARIABLE, RowShares, given


def time_of(rows: list[int], percents: tuple[int, ...]) -> int:
    return max(count * percent for count, percent in zip(rows, percents, strict=True))


def test_a_slow_rank_gets_fewer_rows() -> None:
    assert RowShares(1, 300, (100, 100, 300)).rows(12) == [5, 5, 2]
    assert RowShares(1, 200, (100, 250)).rows(100) == [72, 28]


def test_no_other_division_is_done_earlier() -> None:
    draw = random.Random(7)
    for _ in range(300):
        size, batch = draw.randint(2, 4), draw.randint(4, 14)
        least = draw.randint(1, 2)
        shares = RowShares(least, draw.randint(80, 300), tuple(draw.choice((100, 150, 230)) for _ in range(size)))
        made = shares.rows(batch)
        assert sum(made) == batch
        options = [
            list(rows)
            for rows in itertools.product(range(least, batch * shares.most // (100 * size) + 1), repeat=size)
            if sum(rows) == batch
        ]
        if options:
            assert time_of(made, shares.percents) <= min(time_of(rows, shares.percents) for rows in options)


@pytest.mark.parametrize(
    "shares",
    [
        RowShares(1, 300, (100, 100, 100)),  # nobody is slow
        RowShares(1, 300, (130, 100, 100)),  # a row more would take another rank longer
        RowShares(4, 300, (100, 100, 300)),  # not enough for the microbatches of all
        RowShares(1, 99, (100, 100, 300)),  # no memory for as many as even shares have
    ],
)
def test_shares_are_even_where_others_do_not_help(shares: RowShares) -> None:
    assert shares.rows(11) == [3, 4, 4]


def test_bounds_are_kept() -> None:
    assert RowShares(2, 300, (100, 100, 900)).rows(12) == [5, 5, 2]
    assert RowShares(1, 125, (100, 100, 900)).rows(12) == [5, 5, 2]
    assert RowShares(1, 150, (100, 100, 900)).rows(12) == [6, 5, 1]


def test_they_are_told_in_a_variable() -> None:
    shares = RowShares(2, 40, (100, 231))
    assert given({VARIABLE: shares.text()}, 2) == shares
    assert given({VARIABLE: shares.text()}, 3) is None, "of another start"
    assert given({}, 2) is None


@pytest.mark.parametrize(
    "text", ["", "1:2", "1:2:3:4", "x:2:100,200", "0:4:100,200", "5:0:100,200", "1:4:0,200", "1:4:"]
)
def test_what_is_no_share_is_left_out(text: str) -> None:
    assert given({VARIABLE: text}, 2) is None
