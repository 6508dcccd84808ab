from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_layouts import layouts

from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.program import ActionKind, Layout, Program
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.program_text import from_text, to_text
from rannd.plan.schedule.schedules import gpipe, planned_program, zero_bubble_h1
from rannd.plan.simulate.layout import loss_layout

PIPELINE = Layout(3, 1, ((0,), (1, 2)), ((-1, 0), (-1, 1), (0, 1), (1, 2)), ((-1, 0), (0, 1), (1, 2)))


@given(layouts())
def test_gpipe_is_correct_for_every_layout(layout: Layout) -> None:
    check(gpipe(layout))


@given(layouts(), st.sampled_from(SCHEDULES))
def test_interleaved_programs_are_correct_for_every_layout(layout: Layout, schedule: str) -> None:
    check(planned_program(schedule, loss_layout(layout), range(0, len(layout.stages), 2)))


@given(layouts(), st.sets(st.integers(0, 5)))
def test_zero_bubble_is_correct_for_every_layout_whatever_splits(layout: Layout, split: set[int]) -> None:
    program = zero_bubble_h1(loss_layout(layout), split)
    check(program)
    seen = {
        layout.stage_of(slot)
        for slot, actions in enumerate(program.slots)
        if any(action.kind is ActionKind.WEIGHT for action in actions)
    }
    assert seen == (split & set(range(len(layout.stages))) if len(layout.stages) > 1 else set())


@given(layouts(), st.data())
def test_a_program_with_an_action_left_out_is_refused(layout: Layout, data: st.DataObject) -> None:
    program = data.draw(st.sampled_from([gpipe(layout), zero_bubble_h1(loss_layout(layout), {0, 2})]))
    slot = data.draw(st.sampled_from(range(layout.world)))
    place = data.draw(st.integers(0, len(program.slots[slot]) - 1))
    weights = [action for slot in layout.stages[layout.stage_of(slot)] for action in program.slots[slot]]
    weights = [action for action in weights if action.kind is ActionKind.WEIGHT]
    assume(weights != [program.slots[slot][place]])  # without any the stage is one whose backward is not split
    slots, lengths = list(program.slots), list(program.forward_length)
    slots[slot] = slots[slot][:place] + slots[slot][place + 1 :]
    lengths[slot] -= place < lengths[slot]
    with pytest.raises(PlanError):
        check(Program(program.layout, tuple(slots), tuple(lengths)))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # A value used before it came, a gradient sent before its backward, both sides in agreement.
        ("RV0:0>1@0 F0", "F0 RV0:0>1@0", "slot 1: F0 uses a value that it does not have yet"),
        ("B2 SG2:0>1@0", "SG2:0>1@0 B2", "slot 1: SG2:0>1@0 uses a value that it does not have yet"),
        ("F0 SV0:0>1@1", "SV0:0>1@1 F0", "slot 0: SV0:0>1@1 uses a value that it does not have yet"),
        # One side in another order.
        (
            "RG2:0>1@1 B2 RG1:0>1@2 B1 RG0:0>1@1 B0",
            "RG0:0>1@1 B0 RG1:0>1@2 B1 RG2:0>1@1 B2",
            "slots 0 and 1 disagree about transfer",
        ),
        # A wrong peer, a piece twice, no reduction, a backward in the forward phase.
        ("SV1:0>1@2", "SV1:0>1@1", "missing ['SV1:0>1@2']"),
        ("F1 SV1:1>2@1", "F1 F1 SV1:1>2@1", "too much or wrong ['F1']"),
        ("RG1:-1>0@0 R", "RG1:-1>0@0", "slot 1: a program ends with its reductions, here R; this one has none"),
        ("| RG1:1>2@1 SG2:1>2@1 B1", "B1 | RG1:1>2@1 SG2:1>2@1", "slot 2: B1 at place 7 is in the wrong phase"),
    ],
)
def test_faults_are_named(before: str, after: str, message: str) -> None:
    text = to_text(gpipe(PIPELINE))
    assert text.count(before) == 1
    with pytest.raises(PlanError) as caught:
        check(from_text(text.replace(before, after)))
    assert message in str(caught.value)


TIED = Layout(3, 1, ((0,), (1,), (2,)), ((0, 1), (1, 2)), ((0, 1), (1, 2)), ((0, 2),))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # The gradient of a piece's parameters never made, made twice, or made before that of its values.
        (" W1", "", "missing ['W1']"),
        (" W1", " W1 W1", "too much or wrong ['W1']"),
        ("B1 SG1:0>1@0 W1", "W1 B1 SG1:0>1@0", "slot 1: W1 uses a value that it does not have yet"),
        # A tied weight that one of its holders does not reduce, reduces twice, in another order, or too early.
        ("slot 2: RV0:1>2@1 F0 B0 SG0:1>2@1 RV1:1>2@1 F1 B1 SG1:1>2@1 RV2:1>2@1 F2 B2 SG2:1>2@1 R0 R",
         "slot 2: RV0:1>2@1 F0 B0 SG0:1>2@1 RV1:1>2@1 F1 B1 SG1:1>2@1 RV2:1>2@1 F2 B2 SG2:1>2@1 R",
         "slot 2: a program ends with its reductions, here R0 R; this one has R and"),
        ("W2 R R0", "W2 R0 R R0", "slot 0: a program ends with its reductions, here R R0; this one has R0 R R0"),
        ("W2 R R0", "W2 R0 R", "slot 0: a program ends with its reductions, here R R0; this one has R0 R"),
        ("W2 R R0", "R R0 W2", "here R R0; this one has R R0 and ends with R0 W2"),
    ],
)  # fmt: skip
def test_gradients_are_made_and_reduced_once(before: str, after: str, message: str) -> None:
    text = to_text(zero_bubble_h1(TIED, {0, 1}))
    check(from_text(text))
    assert before in text
    with pytest.raises(PlanError) as caught:
        check(from_text(text.replace(before, after)))
    assert message in str(caught.value)


def test_three_slots_that_wait_in_a_ring_are_a_deadlock() -> None:
    # All orders of pairs agree, yet each slot waits for the next one's input before it gives its own.
    ring = """
        world 3 microbatches 1
        stages 0 | 1 | 2
        edges -1>0 -1>1 -1>2
        slot 0: RV2:-1>0@2 SV0:-1>2@2 SV0:-1>1@1 RV1:-1>0@1 F0 F1 F2 | B0 B1 B2 R
        slot 1: RV0:-1>1@0 SV1:-1>0@0 SV1:-1>2@2 RV2:-1>1@2 F0 F1 F2 | B0 B1 B2 R
        slot 2: RV1:-1>2@1 SV2:-1>1@1 SV2:-1>0@0 RV0:-1>2@0 F0 F1 F2 | B0 B1 B2 R
    """
    with pytest.raises(PlanError, match=r"never ends: slot 0 at RV2:-1>0@2, slot 1 at RV0:-1>1@0, slot 2 at RV1"):
        check(from_text(ring))
    first_gives = ring.replace("RV2:-1>0@2 SV0:-1>2@2 SV0:-1>1@1", "SV0:-1>1@1 RV2:-1>0@2 SV0:-1>2@2")
    check(from_text(first_gives))
