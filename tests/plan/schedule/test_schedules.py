from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_layouts import layouts

from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.program import Action, ActionKind, Layout
from rannd.plan.schedule.program_text import from_text, to_text
from rannd.plan.schedule.schedules import (
    gpipe,
    one_forward_one_backward,
    planned_program,
    window,
    zero_bubble_h1,
)
from rannd.plan.simulate.layout import loss_layout

TWO_STAGES = Layout(2, 2, ((0,), (1,)), ((-1, 0), (0, 1), (1, 2)), ((0, 1), (1, 2)))


def test_two_stages_two_microbatches() -> None:
    assert to_text(gpipe(TWO_STAGES)) == (
        "world 2 microbatches 2\n"
        "stages 0 | 1\n"
        "edges -1>0 0>1* 1>2*\n"
        "slot 0: RV1:-1>0@1 RV3:-1>0@1 F0 SV0:0>1@1 F1 SV1:0>1@1 F2 SV2:0>1@1 F3 SV3:0>1@1 RV0:1>2@1 RV2:1>2@1"
        " | SG0:1>2@1 SG2:1>2@1 RG3:0>1@1 B3 RG2:0>1@1 B2 RG1:0>1@1 B1 RG0:0>1@1 B0 R\n"
        "slot 1: SV1:-1>0@0 SV3:-1>0@0 RV0:0>1@0 F0 RV1:0>1@0 F1 RV2:0>1@0 F2 RV3:0>1@0 F3 SV0:1>2@0 SV2:1>2@0"
        " | RG0:1>2@0 RG2:1>2@0 B3 SG3:0>1@0 B2 SG2:0>1@0 B1 SG1:0>1@0 B0 SG0:0>1@0 R\n"
    )


def test_unequal_replicas_and_a_skip_edge() -> None:
    layout = Layout(3, 1, ((0,), (1, 2)), ((-1, 0), (-1, 1), (0, 1), (1, 2)), ((-1, 0), (0, 1), (1, 2)))
    assert to_text(gpipe(layout)) == (
        "world 3 microbatches 1\n"
        "stages 0 | 1 2\n"
        "edges -1>0* -1>1 0>1* 1>2*\n"
        "slot 0: SV0:-1>1@1 RV1:-1>0@1 RV2:-1>0@2 F0 SV0:0>1@1 F1 SV1:0>1@2 F2 SV2:0>1@1 RV0:1>2@1"
        " | SG0:1>2@1 RG2:0>1@1 B2 RG1:0>1@2 B1 RG0:0>1@1 B0 SG1:-1>0@1 SG2:-1>0@2 R\n"
        "slot 1: RV0:-1>1@0 SV1:-1>0@0 SV1:-1>1@2 RV2:-1>1@2 RV0:0>1@0 F0 RV2:0>1@0 F2 SV0:1>2@0 RV1:1>2@2 SV2:1>2@2"
        " | RG0:1>2@0 SG1:1>2@2 RG2:1>2@2 B2 SG2:0>1@0 B0 SG0:0>1@0 RG1:-1>0@0 R\n"
        "slot 2: RV1:-1>1@1 SV2:-1>0@0 SV2:-1>1@1 RV1:0>1@0 F1 SV1:1>2@1 RV2:1>2@1"
        " | RG1:1>2@1 SG2:1>2@1 B1 SG1:0>1@0 RG2:-1>0@0 R\n"
    )


def test_pure_data_parallel_moves_nothing() -> None:
    layout = Layout(3, 2, ((0, 1, 2),), ((-1, 0), (0, 1)), ((-1, 0), (0, 1)))
    assert to_text(gpipe(layout)).splitlines()[3:] == [
        "slot 0: F0 F3 | B3 B0 R",
        "slot 1: F1 F4 | B4 B1 R",
        "slot 2: F2 F5 | B5 B2 R",
    ]


def test_replicas_take_pieces_in_turns() -> None:
    layout = Layout(4, 2, ((0, 1, 2), (3,)), ((-1, 0), (0, 1)), ())
    assert [layout.slot_of(0, piece) for piece in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert layout.pieces(0, 1) == (1, 4, 7)
    assert layout.pieces(-1, 3) == (3, 7)


def test_pipelines_side_by_side_take_neighbouring_ranks() -> None:
    """Two pipelines: ranks 0 to 2 and their stages' first replicas, ranks 3 to 5 and the others."""
    layout = Layout(6, 2, ((0, 1, 2, 3), (4, 5)), ((-1, 0), (0, 1)), ())
    assert layout.pipelines == 2
    assert [layout.slot_of(0, piece) for piece in range(12)] == [0, 1, 0, 2, 3, 2, 1, 0, 1, 3, 2, 3]
    assert [layout.slot_of(1, piece) for piece in range(12)] == [4, 4, 4, 5, 5, 5] * 2
    equal = Layout(6, 2, ((0, 2, 4), (1, 3, 5)), ((-1, 0), (0, 1)), ())
    assert [equal.slot_of(0, piece) for piece in range(12)] == [0, 0, 2, 2, 4, 4] * 2


@given(layouts())
def test_every_replica_has_its_share_and_all_ways_to_ask_agree(layout: Layout) -> None:
    for stage, slots in enumerate(layout.stages):
        runs = [layout.slot_of(stage, piece) for piece in range(layout.pieces_total)]
        assert runs == layout.slots_of(stage)
        for slot in slots:
            own = tuple(piece for piece, where in enumerate(runs) if where == slot)
            assert own == layout.pieces(stage, slot)
            assert len(own) <= -(-layout.pieces_total // len(slots))


def computations(layout: Layout, slot: int) -> str:
    actions = one_forward_one_backward(layout).slots[slot]
    return " ".join(str(action) for action in actions if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD))


def test_one_forward_one_backward() -> None:
    layout = Layout(2, 2, ((0,), (1,)), ((-1, 0), (0, 1), (1, 2)), ((0, 1),))
    assert to_text(one_forward_one_backward(layout)) == (
        "world 2 microbatches 2\n"
        "stages 0 | 1\n"
        "edges -1>0 0>1* 1>2\n"
        "slot 0: RV1:-1>0@1 RV3:-1>0@1 F0 SV0:0>1@1 F1 SV1:0>1@1 F2 SV2:0>1@1 RG0:0>1@1 B0"
        " F3 SV3:0>1@1 RG1:0>1@1 B1 RG2:0>1@1 B2 RG3:0>1@1 B3 RV0:1>2@1 RV2:1>2@1 R |\n"
        "slot 1: SV1:-1>0@0 SV3:-1>0@0 RV0:0>1@0 F0 B0 SG0:0>1@0 RV1:0>1@0 F1 B1 SG1:0>1@0 RV2:0>1@0 F2 B2 SG2:0>1@0"
        " RV3:0>1@0 F3 B3 SG3:0>1@0 SV0:1>2@0 SV2:1>2@0 R |\n"
    )


def test_four_stages_have_falling_windows() -> None:
    edges = ((0, 1), (1, 2), (2, 3))
    layout = Layout(4, 2, ((0,), (1,), (2,), (3,)), edges, edges)
    assert [computations(layout, slot) for slot in range(4)] == [
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


@given(layouts())
def test_slots_keep_to_their_windows(layout: Layout) -> None:
    layout = loss_layout(layout)
    program = one_forward_one_backward(layout)
    for slot, actions in enumerate(program.slots):
        flying = most = 0
        for action in actions:
            flying += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
            most = max(most, flying)
        assert most <= window(layout, layout.stage_of(slot))


def test_an_interleaved_step_has_no_gradients_of_outputs() -> None:
    with pytest.raises(PlanError, match="gradients of outputs are sent"):
        one_forward_one_backward(TWO_STAGES)


def test_a_schedule_that_is_not_known() -> None:
    with pytest.raises(PlanError, match="no schedule is named 'zb'; use one of 1f1b, gpipe"):
        planned_program("zb", TWO_STAGES)


@given(layouts(), st.sampled_from(SCHEDULES))
def test_text_of_interleaved_programs_round_trips(layout: Layout, schedule: str) -> None:
    program = planned_program(schedule, loss_layout(layout), range(0, len(layout.stages), 2))
    assert program.interleaved
    assert from_text(to_text(program)) == program


@given(layouts())
def test_every_piece_is_on_one_replica_of_each_stage(layout: Layout) -> None:
    for stage, slots in enumerate(layout.stages):
        pieces = [layout.pieces(stage, slot) for slot in slots]
        assert sorted(piece for each in pieces for piece in each) == list(range(layout.pieces_total))
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(layouts())
def test_text_round_trips(layout: Layout) -> None:
    program = gpipe(layout)
    assert from_text(to_text(program)) == program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 lines"),
        ("world 1\nstages 0\nedges\nslot 0: | R", "begins with"),
        ("world 1 microbatches 1\nstages 0\nedges\nslot 0: F0 | B0 X\n", "'X' is not an action"),
        ("world 1 microbatches 1\nstages 0\nedges\nslot 0: F0 | B0 W0 RX\n", "'RX' is not an action"),
        ("world 1 microbatches 1\nstages 0\nedges\ntied 0\nslot 0: F0 | B0 R\n", "2 slots; its world is 1"),
        ("world 1 microbatches 1\nstages 0\nedges\nslot 0: F0 B0 R\n", "slot 0: forward actions | backward"),
        ("world 2 microbatches 1\nstages 0 1\nedges\nslot 0: F0 | B0 R\n", "1 slots; its world is 2"),
    ],
)
def test_text_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_text(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ({"stages": ((0,), (0,))}, "each of 2 slots once"),
        ({"stages": ((0, 1), ())}, "without a slot"),
        ({"microbatches": 0}, "0 microbatches"),
        ({"edges": ((1, 0),)}, "rising stages"),
        ({"edges": ((0, 1), (-1, 0))}, "sorted"),
        ({"edges": ((-1, 2),), "grad_edges": ()}, "rising stages"),
        ({"grad_edges": ((-1, 1),)}, "part of the edges"),
        ({"tied": ((0,),)}, "tied stages ((0,),) are not sorted sets"),
        ({"tied": ((0, 2),)}, "of stages 0 to 1"),
        ({"tied": ((1, 0),)}, "sorted sets"),
        ({"tied": ((0, 1), (0, 1))}, "sorted sets"),
    ],
)
def test_impossible_layouts_are_refused(demand: dict[str, object], message: str) -> None:
    given_parts = {name: getattr(TWO_STAGES, name) for name in TWO_STAGES.__struct_fields__}
    with pytest.raises(PlanError) as caught:
        Layout(**(given_parts | demand))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_an_action_s_text() -> None:
    assert str(Action(ActionKind.SEND_VALUES, 3, 0, 1, 2)) == "SV3:0>1@2"
    assert str(Action(ActionKind.FORWARD, 3)) == "F3"
    assert str(Action(ActionKind.WEIGHT, 3)) == "W3"
    assert str(Action(ActionKind.REDUCE)) == "R"
    assert str(Action(ActionKind.REDUCE, 1)) == "R1"


def test_zero_bubble_splits_the_stages_it_is_told_to() -> None:
    layout = Layout(2, 2, ((0,), (1,)), ((0, 1),), ((0, 1),), ((0, 1),))
    assert to_text(zero_bubble_h1(layout, {1})) == (
        "world 2 microbatches 2\n"
        "stages 0 | 1\n"
        "edges 0>1*\n"
        "tied 0+1\n"
        "slot 0: F0 SV0:0>1@1 F1 SV1:0>1@1 F2 SV2:0>1@1 RG0:0>1@1 B0"
        " F3 SV3:0>1@1 RG1:0>1@1 B1 RG2:0>1@1 B2 RG3:0>1@1 B3 R R0 |\n"
        "slot 1: RV0:0>1@0 F0 B0 SG0:0>1@0 RV1:0>1@0 F1 B1 SG1:0>1@0 RV2:0>1@0 F2 B2 SG2:0>1@0 W0"
        " RV3:0>1@0 F3 B3 SG3:0>1@0 W1 W2 W3 R0 R |\n"
    )


@given(layouts(), st.sets(st.integers(0, 5)))
def test_zero_bubble_keeps_to_its_windows(layout: Layout, split: set[int]) -> None:
    layout = loss_layout(layout)
    for slot, actions in enumerate(zero_bubble_h1(layout, split).slots):
        stage = layout.stage_of(slot)
        whole = -(-layout.world // len(layout.stages[stage])) + (len(layout.stages) > 1)
        flying = kept = 0
        for action in actions:
            flying += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
            kept += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.WEIGHT)
            assert flying <= window(layout, stage)
            assert kept <= whole or stage not in split or len(layout.stages) == 1


@given(layouts(), st.sets(st.integers(0, 5)))
def test_text_of_zero_bubble_round_trips(layout: Layout, split: set[int]) -> None:
    program = zero_bubble_h1(loss_layout(layout), split)
    assert from_text(to_text(program)) == program


def test_without_a_stage_to_split_zero_bubble_is_1f1b() -> None:
    layout = Layout(3, 2, ((0, 2), (1,)), ((0, 1),), ((0, 1),))
    assert zero_bubble_h1(layout, ()) == one_forward_one_backward(layout)


def test_every_schedule_splits_the_stages_that_are_planned_so() -> None:
    assert SCHEDULES == ("1f1b", "gpipe", "zb_h1")
    layout = loss_layout(TWO_STAGES)
    assert planned_program("zb_h1", layout, {0}) == zero_bubble_h1(layout, {0})
    with pytest.raises(PlanError, match="no schedule is named 'zb'; use one of 1f1b, gpipe, zb_h1"):
        planned_program("zb", layout)


def test_one_stage_delays_nothing() -> None:
    layout = Layout(2, 2, ((0, 1),), ((-1, 0),), ())
    assert zero_bubble_h1(layout, {0}) == one_forward_one_backward(layout)
