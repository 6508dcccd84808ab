"""Times of a rank: medians of its steps, of a microbatch the mean of a step."""

from __future__ import annotations

import msgspec

from rannd.plan.measured_step import EdgeWaits, StageTimes, Typical
from rannd.runtime.timeline.recorder import Doing, Place, StepRow
from rannd.runtime.timeline.step_times import rank_times


def row(number: int, sums: dict[Place, tuple[int, float]], period_us: float = 0.0) -> StepRow:
    """A step with these numbers and microseconds."""
    made = StepRow(number, 1000)
    made.end_ns = 1000 + round(period_us * 1e3)
    made.sums = {place: [count, round(us * 1e3)] for place, (count, us) in sums.items()}
    made.delays = {
        (Doing.CALL, -1): [15_000, 8_000],
        (Doing.RECEIVE, 0): [9_000, 0],
        (Doing.FORWARD, 1): [6_000, 2_000],
        (Doing.SEND, 0): [2_000, 1_000],
    }
    made.host_ns = 1000 * (number + 1)
    return made


def test_times_of_a_rank() -> None:
    rows = [
        row(
            number,
            {
                (Doing.AGREE, -1, -1): (1, 10.0 * slower),
                (Doing.FORWARD, 1, 1): (4, 40.0 * slower),
                (Doing.BACKWARD, 1, 1): (4, 80.0 * slower),
                (Doing.WEIGHT, 1, 1): (4, 26.0),
                (Doing.RECEIVE, 0, 1): (4, 12.0),
                (Doing.RECEIVE, 1, 2): (4, 8.0),
                (Doing.SEND, 0, 1): (4, 3.0),
                (Doing.SEND, 1, 2): (4, 4.0),
                (Doing.SETTLE, -1, -1): (1, 1.0),
                (Doing.REDUCE, -1, -1): (1, 30.0),
                (Doing.DRAIN, -1, -1): (1, 9.0),
                (Doing.PACK, 1, 1): (2, 6.0),
                (Doing.PACK, 0, 0): (1, 1.0),
                (Doing.CALL, -1, -1): (2, 200.0 * slower),
            },
            period_us=200.0 * slower + 50.0,
        )
        for number, slower in enumerate((1.0, 2.0, 1.0, 1.0, 3.0, 3.0, 2.0, 4.0, 2.0))
    ]
    found = rank_times(rows, 3, [1])
    assert found.slot == 3
    assert found.steps == 9
    assert found.stages == (StageTimes(1, 4, Typical(20.0, 18.0, 0.5), Typical(40.0, 40.0), Typical(5.0, 5.0)),)
    assert (found.processor_us, found.beside_us, found.threads_us) == (4 * 1.5, 4 * 0.5, 8.0)
    assert found.waits == (EdgeWaits(0, 1, 4, 12.0), EdgeWaits(1, 2, 4, 8.0))
    assert (found.agree_us, found.step_us) == (20.0, 380.0)
    assert (found.send_us, found.settle_us, found.reduce_us, found.drain_us) == (7.0, 1.0, 30.0, 9.0)
    assert found.between_us == 50.0
    assert found.computing_us == 260.0
    assert (found.sends, found.handled) == (8, 12 + 8 + 8)
    assert (found.host_us, found.runtime_us) == (5.0, 5.0), "gradients are reduced"
    assert msgspec.structs.replace(found, reduce_us=0.0).runtime_us == 13.0
    assert found.pack_us == 7.0, "is no part of its second halves"
    assert found.rest_us == 380.0 - 260.0 - 20.0 - 7.0 - 1.0 - 9.0 - 7.0


def test_gradients_are_packed_within_what_completes_them() -> None:
    packed = row(0, {(Doing.BACKWARD, 1, 1): (2, 80.0), (Doing.PACK, 1, 1): (3, 30.0)})
    packed.delays |= {(Doing.BACKWARD, 1): [9_000, 5_000], (Doing.PACK, 1): [3_000, 4_000]}
    (found,) = rank_times([packed], 0, [1]).stages
    assert found.backward == Typical(25.0, 21.5, 0.5)


def test_what_reductions_take_is_known_of_steps_that_others_do_not_disturb() -> None:
    rows = []
    for number, drain_us in enumerate((50.0, 20.0, 90.0, 30.0, 80.0, 40.0, 60.0, 70.0, 60.0)):
        took = {(Doing.DRAIN, -1, -1): (1, drain_us), (Doing.PACK, 1, 1): (1, 5.0), (Doing.CALL, -1, -1): (1, 200.0)}
        made = row(number, took)
        made.delays = {(Doing.BACKWARD, 1): [4_000, 7_000], (Doing.PACK, 1): [0, 3_000], (Doing.CALL, -1): [0, 99_000]}
        rows.append(made)
    assert rank_times(rows, 0, [1]).reduced_us == 60.0 + 5.0 + 4.0
    for disturbed in (2, 4):
        rows[disturbed].delays[Doing.BACKWARD, 1][0] = 4_001
    assert rank_times(rows, 0, [1]).reduced_us == 50.0 + 5.0 + 4.0
    rows[0].delays[Doing.BACKWARD, 1][0] = 4_001
    assert rank_times(rows, 0, [1]).reduced_us == 0, "too many were disturbed"
    assert rank_times([], 0, [1]).reduced_us == 0


def test_a_rank_that_has_recorded_nothing_has_its_stages() -> None:
    found = rank_times([], 0, [0, 2])
    assert [(each.stage, each.pieces, each.forward) for each in found.stages] == [(0, 0, Typical()), (2, 0, Typical())]
    assert (found.steps, found.step_us, found.waits) == (0, 0.0, ())
