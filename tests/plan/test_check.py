from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_layouts import layouts

from rannd.errors import PlanError
from rannd.plan.check import check
from rannd.plan.schedule import SCHEDULES, Layout, Program, fill_drain, from_text, interleaved_program, to_text

PIPELINE = Layout(3, 1, ((0,), (1, 2)), ((-1, 0), (-1, 1), (0, 1), (1, 2)), ((-1, 0), (0, 1), (1, 2)))


@given(layouts())
def test_fill_drain_is_correct_for_every_layout(layout: Layout) -> None:
    check(fill_drain(layout))


@given(layouts(), st.sampled_from(SCHEDULES))
def test_interleaved_programs_are_correct_for_every_layout(layout: Layout, schedule: str) -> None:
    last = len(layout.stages)
    grads = tuple(edge for edge in layout.grad_edges if edge[1] < last)
    check(interleaved_program(schedule, Layout(layout.world, layout.microbatches, layout.stages, layout.edges, grads)))


@given(layouts(), st.data())
def test_a_program_with_an_action_left_out_is_refused(layout: Layout, data: st.DataObject) -> None:
    program = fill_drain(layout)
    slot = data.draw(st.sampled_from(range(layout.world)).filter(lambda slot: len(program.slots[slot]) > 0))
    place = data.draw(st.integers(0, len(program.slots[slot]) - 1))
    slots, lengths = list(program.slots), list(program.forward_length)
    slots[slot] = slots[slot][:place] + slots[slot][place + 1 :]
    lengths[slot] -= place < lengths[slot]
    with pytest.raises(PlanError):
        check(Program(layout, tuple(slots), tuple(lengths)))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # A value used before it came, a gradient sent before its backward, both sides in agreement.
        ("RV0:0>1@0 F0", "F0 RV0:0>1@0", "slot 1: F0 uses what is not there yet"),
        ("B2 SG2:0>1@0", "SG2:0>1@0 B2", "slot 2: SG2:0>1@0 uses what is not there yet"),
        ("F0 SV0:0>1@1", "SV0:0>1@1 F0", "slot 0: SV0:0>1@1 uses what is not there yet"),
        # One side in another order.
        ("RG1:0>1@1 B1 RG0:0>1@1 B0", "RG0:0>1@1 B0 RG1:0>1@1 B1", "slots 0 and 1 disagree about transfer"),
        # A wrong peer, a piece twice, no reduction, a backward in the forward phase.
        ("SV2:0>1@2", "SV2:0>1@1", "missing ['SV2:0>1@2']"),
        ("F2 | B2", "F2 F2 | B2", "too much or wrong ['F2']"),
        ("RG1:-1>0@0 R", "RG1:-1>0@0", "ends with its one reduction"),
        ("F2 | B2", "F2 B2 |", "slot 2: B2 at place 3 is in the wrong phase"),
    ],
)
def test_faults_are_named(before: str, after: str, message: str) -> None:
    text = to_text(fill_drain(PIPELINE))
    assert text.count(before) == 1
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
