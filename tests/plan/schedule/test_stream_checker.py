"""Under NCCL's rules no step of any layout hangs as it is issued now; the checker finds the hangs of older orders."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipeline
from plan_layouts import Make, interleaved, layouts

from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.program import ActionKind, Layout, Program
from rannd.plan.schedule.schedules import gpipe, planned_program
from rannd.plan.schedule.stream_checker import StreamRules, Streams, check_streams
from rannd.plan.simulate.layout import loss_layout

LATE = StreamRules(overlap=False)


def hangs(program: Program, posting: Posting, rules: StreamRules) -> bool:
    try:
        check_streams(program, posting, rules)
    except PlanError:
        return True
    return False


@given(layouts(max_world=8), st.sampled_from([None, *SCHEDULES]), st.sets(st.integers(0, 5)), st.sampled_from(Streams))
def test_no_step_hangs(layout: Layout, schedule: str | None, split: set[int], streams: Streams) -> None:
    """Whatever synchronises: receives of all slots are posted in one order with all sends."""
    program = gpipe(layout) if schedule is None else planned_program(schedule, loss_layout(layout), split)
    check_streams(program, Posting.MATCHED, StreamRules(streams, overlap=False))


@given(interleaved(), interleaved(asked=True), st.sampled_from(Streams))
def test_no_step_hangs_in_which_slots_have_several_stages(
    inside: tuple[Layout, Make], asked: tuple[Layout, Make], streams: Streams
) -> None:
    """Also where replicas meet: they have the same stages, and run them in the same order."""
    for program in (inside[1](inside[0]), gpipe(asked[0])):
        rules = StreamRules(streams, overlap=False)
        check_streams(program, Posting.MATCHED, rules)
        check_streams(program, Posting.MATCHED, dataclasses.replace(rules, meets=True))
        check_streams(program, Posting.AHEAD, StreamRules(synchronises=False, overlap=False, meets=True))


@given(interleaved())
def test_reductions_of_later_stages_may_begin_before_the_slot_s_last_backward(case: tuple[Layout, Make]) -> None:
    layout, make = case
    check_streams(make(msgspec.structs.replace(layout, tied=())), Posting.MATCHED, StreamRules(Streams.PAIR))


MEETING = StreamRules(overlap=False, meets=True)


@pytest.mark.parametrize("streams", Streams)
@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.full)])
def test_no_step_hangs_in_which_replicas_meet(world: int, streams: Streams) -> None:
    """ZeRO 2 and 3, for all that the planner may choose: equally many replicas of all stages."""
    count = 0
    for _, program in pipelines(world):
        if len(set(map(len, program.layout.stages))) == 1:
            check_streams(program, Posting.MATCHED, dataclasses.replace(MEETING, streams=streams))
            check_streams(program, Posting.AHEAD, dataclasses.replace(MEETING, synchronises=False))
            count += 1
    assert count > 30


def test_other_steps_in_which_replicas_meet_may_hang() -> None:
    told = []
    for _, program in pipelines(4):
        try:
            check_streams(program, Posting.MATCHED, MEETING)
        except PlanError as exc:
            told.append(str(exc))
    assert any("of the replicas of stage 2 waits for" in each for each in told)
    assert any("do not run forwards and backwards in the same order" in each for each in told)


def pipelines(world: int, schedules: Sequence[str] = ("1f1b", "gpipe")) -> Iterator[tuple[str, Program]]:
    """Interleaved steps of all pipelines of `world` slots in at least two stages."""
    for stages in range(2, world + 1):
        for cuts in itertools.combinations(range(1, world), stages - 1):
            replicas = [end - start for start, end in itertools.pairwise([0, *cuts, world])]
            for microbatches in (1, 2, 4):
                for labels, outputs, skip in ((1, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 1)):
                    if skip and stages < 3:
                        continue
                    layout = pipeline(
                        *replicas,
                        microbatches=microbatches,
                        labels=bool(labels),
                        outputs=bool(outputs),
                        skip=bool(skip),
                    )
                    for schedule in schedules:
                        program = planned_program(schedule, layout, range(stages))
                        yield f"{replicas} {microbatches} {schedule}", program


OLD = StreamRules(Streams.PAIR, opened=False, synchronises=False)
"""What torch does for unbatched sends and receives."""
ONE_STREAM = StreamRules(Streams.SLOT, synchronises=False)
"""What torch does in groups of a `device_id`."""


@pytest.mark.parametrize(
    ("most", "of", "lazy", "one_stream", "synchronised"),
    [(4, 228, 137, 192, 222), pytest.param(6, 1278, 1063, 1224, 1265, marks=pytest.mark.full)],
)
def test_hangs_of_receives_that_were_posted_ahead(
    most: int, of: int, lazy: int, one_stream: int, synchronised: int
) -> None:
    programs = [program for world in range(2, most + 1) for _, program in pipelines(world)]
    assert len(programs) == of
    counts = [
        sum(hangs(program, Posting.AHEAD, rules) for program in programs)
        for rules in (OLD, ONE_STREAM, StreamRules(overlap=False))
    ]
    assert counts == [lazy, one_stream, synchronised]
    delaying = [program for world in range(2, most + 1) for _, program in pipelines(world, ["zb_h1"])]
    assert any(action.kind is ActionKind.WEIGHT for program in delaying for action in program.slots[0])
    assert not any(hangs(program, Posting.MATCHED, LATE) for program in (*programs, *delaying))


def test_which_pipelines_hung() -> None:
    """Two slots never did, which is why two ranks on one machine show nothing."""
    ahead, one = Posting.AHEAD, planned_program("1f1b", pipeline(1, 1))
    assert not hangs(one, ahead, OLD)
    for replicas in ((2, 2), (1, 1, 1, 1)):
        program = planned_program("1f1b", pipeline(*replicas))
        assert hangs(program, ahead, OLD), replicas
        assert hangs(program, ahead, ONE_STREAM), replicas
    with pytest.raises(PlanError, match=r"would never end on devices with streams: .*slot 0 at F0 waits for"):
        check_streams(one, ahead, LATE)


def test_reductions_that_begin_in_a_backward_can_hang() -> None:
    """A replica that waits in its last backward for another one, which waits for it through the first stage."""
    program = planned_program("gpipe", pipeline(1, 3, microbatches=2))
    check_streams(program, Posting.MATCHED, LATE)
    with pytest.raises(PlanError, match="the reduction R"):
        check_streams(program, Posting.MATCHED, StreamRules())
    check_streams(planned_program("1f1b", pipeline(1, 3, microbatches=2)), Posting.MATCHED, StreamRules())
