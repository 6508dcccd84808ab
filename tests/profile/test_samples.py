"""What counts of repeated runs, some of which other processes have disturbed."""

from __future__ import annotations

import random

import pytest

from rannd.device.timing import Sample
from rannd.profile.points import Measured, Point
from rannd.profile.samples import LEAST_DELAYED, UNCERTAIN, RowSamples, Turn, counted, typical


def runs(*times: float, disturbed: bool = False) -> list[Sample]:
    return [Sample(us, disturbed) for us in times]


def test_the_quickest_typical_runs_count() -> None:
    assert typical([runs(100, 104, 102, 300), runs(500, 501, 502, 503), runs(101, 103, 105, 107)]) == (
        pytest.approx(100.5),
        pytest.approx(1 / 100.5),
    ), "a quarter of a turn's runs is quicker at most"
    assert typical([runs(100, 100, 100, 100), runs(150, 150, 150)]) == (125, pytest.approx(50 / 125)), "they disagree"
    assert typical([runs(7.0, 9.0, 8.0)]) == (7.5, pytest.approx(1 / 7.5)), "a single turn"
    assert typical([runs(7.0)]) == (7.0, 0.0)
    assert typical([]) == typical([[], []]) == (0.0, 0.0)
    assert typical([runs(0.0, 0.0)]) == (0.0, 0.0)


def test_disturbed_runs_count_only_if_there_are_no_others() -> None:
    calm, disturbed = runs(100, 101, 102), runs(90, 91, 92, disturbed=True)
    assert typical([[*calm, *disturbed], [*calm, *disturbed]]) == (100, 0)
    assert typical([calm, disturbed, calm]) == (100, 0)
    us, spread = typical([calm, disturbed, disturbed])
    assert (us, spread) == (90, UNCERTAIN)


def test_noise_that_comes_and_goes_is_left_out() -> None:
    random.seed(0)
    for _ in range(200):
        turns = []
        for busy in [False, False, *random.choices([False, True], k=4)]:
            longer = random.uniform(1.3, 2.5) if busy else 1.0
            turns.append(runs(*(1000 * longer * random.uniform(1.0, 1.04) for _ in range(6))))
        random.shuffle(turns)
        us, spread = typical(turns)
        assert 1000 <= us <= 1030
        assert spread < 0.03


def test_turns_of_several_ranks_are_one() -> None:
    one = Turn({4: RowSamples(tuple(runs(1)), tuple(runs(2)), tuple(runs(3)))}, tuple(runs(5)), 0.5)
    other = Turn({4: RowSamples(tuple(runs(7))), 8: RowSamples(tuple(runs(9)))}, (), 0.7)
    both = one.and_those([other])
    assert both.rows == {
        4: RowSamples(tuple(runs(1, 7)), tuple(runs(2)), tuple(runs(3))),
        8: RowSamples(tuple(runs(9))),
    }
    assert both.adding == tuple(runs(5))
    assert both.seconds == 0.7


def test_a_measurement_has_the_times_of_its_turns() -> None:
    first = Measured((Point(1, 9, 9, 0, 100), Point(4, 9, 9, 0, 400)), 0, (2,))
    rows = RowSamples(tuple(runs(100, 100, 100)), tuple(runs(200, 200, 200)), tuple(runs(150, 150)))
    turn = Turn({4: rows}, tuple(runs(7)), 1.0)
    found = counted(first, [turn, turn])
    assert found == Measured((Point(1, 9, 9, 0, 100, UNCERTAIN), Point(4, 100, 200, 50, 400, 0.0)), 0, (2,), 7)
    longer = RowSamples(rows.forward, rows.backward, tuple(runs(900, 900)))
    assert counted(first, [Turn({4: longer})] * 2).points[1].weight_us == LEAST_DELAYED * 200, "noise hides it"
    assert counted(first, [Turn({4: RowSamples(rows.forward)})] * 2).points[1] == Point(4, 100, 0, 0, 400, 0.0)
