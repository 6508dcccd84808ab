"""Interleaved stages: published orders, bubbles and memory, and no deadlock in any layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from plan_costs import virtual
from plan_layouts import Make, interleaved

from rannd.errors import PlanError
from rannd.plan.schedule.program import Action, ActionKind, Layout, Program
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.program_text import from_text, to_text
from rannd.plan.schedule.schedules import gpipe, one_forward_one_backward, planned_program
from rannd.plan.schedule.virtual_stages import (
    INTERLEAVED_1F1B,
    ZB_V,
    interleaved_1f1b,
    round_robin,
    v_shape,
    zero_bubble_v,
)
from rannd.plan.simulate.layout import loss_layout
from rannd.plan.simulate.simulator import Simulation, predict_order, simulate
from rannd.plan.simulate.timeline import COMPUTE


def chain(positions: int, passes: int, microbatches: int, *, v: bool = False) -> Layout:
    """One pipeline, values to the next stage only."""
    slots = tuple((slot,) for slot in range(positions))
    stages = v_shape(slots) if v else round_robin(slots, passes)
    edges = tuple((stage, stage + 1) for stage in range(len(stages) - 1))
    return Layout(positions, microbatches, stages, edges, edges)


def zb_v(layout: Layout) -> Program:
    return zero_bubble_v(layout, range(len(layout.stages)))


def played(make: Make, layout: Layout) -> Simulation:
    program = make(layout)
    check(program)
    return simulate(program, virtual(layout), record=True)


@given(interleaved())
def test_a_program_computes_and_moves_everything_once_and_ends(case: tuple[Layout, Make]) -> None:
    layout, make = case
    program = make(layout)
    check(program)
    assert from_text(to_text(program)) == program


@given(interleaved())
def test_equal_parts_are_predicted_as_the_whole_is_simulated(case: tuple[Layout, Make]) -> None:
    layout, make = case
    costs = virtual(layout, transfer=0.25)
    assert predict_order(make, layout, costs) == simulate(make(layout), costs)


@pytest.mark.parametrize("positions", [2, 3, 4, 8])
@pytest.mark.parametrize("passes", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_slot(
    positions: int, passes: int, microbatches: int
) -> None:
    """Narayanan et al. (2021), section 2.2: (p - 1) / (v m) of the computing time, with F = 1, B = 2."""
    layout = chain(positions, passes, microbatches)
    pieces = layout.pieces_total
    for ahead in (0, 1):
        found = played(lambda part, ahead=ahead: interleaved_1f1b(part, ahead=ahead), layout)
        assert found.busy_us == (3.0 * passes * pieces,) * positions
        assert found.step_us / found.busy_us[0] - 1 == pytest.approx((positions - 1) / (passes * pieces))


@pytest.mark.parametrize(("positions", "passes"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_interleaving_keeps_as_much_as_published(positions: int, passes: int) -> None:
    """Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.1: the
    first slot keeps 1 + (p - 1) / (p v) of the whole model's activations of a microbatch, each slot having 1 / p of it.
    """
    found = played(interleaved_1f1b, chain(positions, passes, 4))
    of_model = positions * passes  # a microbatch keeps one byte in each stage
    assert found.peak_bytes[0] == of_model * (1 + (positions - 1) / (positions * passes))
    assert found.peak_bytes == tuple(found.peak_bytes[0] - 2 * slot for slot in range(positions))


def test_the_order_of_two_positions() -> None:
    """Megatron-LM's: groups of as many microbatches as there are positions pass all stages of a slot in turn."""
    edges = ((0, 1), (1, 2), (2, 3))
    layout = Layout(2, 2, ((0,), (1,), (0,), (1,)), edges, edges, ((0, 3),))
    assert to_text(interleaved_1f1b(layout)) == (
        "world 2 microbatches 2\n"
        "stages 0 | 1 | 0 | 1\n"
        "edges 0>1* 1>2* 2>3*\n"
        "tied 0+3\n"
        "slot 0: F0.0 SV0:0>1@1 F1.0 SV1:0>1@1 RV0:1>2@1 F0.2 SV0:2>3@1 RV1:1>2@1 F1.2 SV1:2>3@1 F2.0 SV2:0>1@1"
        " RG0:2>3@1 B0.2 SG0:1>2@1 F3.0 SV3:0>1@1 RG1:2>3@1 B1.2 SG1:1>2@1 RV2:1>2@1 F2.2 SV2:2>3@1 RG0:0>1@1 B0.0"
        " RV3:1>2@1 F3.2 SV3:2>3@1 RG1:0>1@1 B1.0 RG2:2>3@1 B2.2 SG2:1>2@1 RG3:2>3@1 B3.2 SG3:1>2@1 RG2:0>1@1 B2.0"
        " RG3:0>1@1 B3.0 R.2 R0 R.0 |\n"
        "slot 1: RV0:0>1@0 F0.1 SV0:1>2@0 RV1:0>1@0 F1.1 SV1:1>2@0 RV0:2>3@0 F0.3 B0.3 SG0:2>3@0 RV1:2>3@0 F1.3 B1.3"
        " SG1:2>3@0 RV2:0>1@0 F2.1 SV2:1>2@0 RG0:1>2@0 B0.1 SG0:0>1@0 RV3:0>1@0 F3.1 SV3:1>2@0 RG1:1>2@0 B1.1"
        " SG1:0>1@0 RV2:2>3@0 F2.3 B2.3 SG2:2>3@0 RV3:2>3@0 F3.3 B3.3 SG3:2>3@0 RG2:1>2@0 B2.1 SG2:0>1@0 RG3:1>2@0"
        " B3.1 SG3:0>1@0 R.3 R.1 R0 |\n"
    )


@pytest.mark.parametrize("positions", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 3])
def test_zb_v_is_never_idle_in_between_and_keeps_what_1f1b_does(positions: int, microbatches: int) -> None:
    """Qi et al. (ICLR 2024), section 6, with F = B = W: no bubble of a slot, and the peak of 1F1B on all slots."""
    layout = chain(positions, 2, microbatches, v=True)
    found = played(zb_v, layout)
    for slot in range(positions):
        own = [event for event in found.events if event.slot == slot and event.category == COMPUTE]
        assert own[-1].start_us + own[-1].us - own[0].start_us == found.busy_us[slot] == 6.0 * layout.pieces_total
    # Slots do not begin together: one forward later for each position.
    assert found.step_us == 6.0 * layout.pieces_total + positions - 1
    whole = 2  # bytes of a slot's share of the model for a microbatch
    assert found.peak_bytes == (positions * whole,) * positions


def test_zb_v_sends_nothing_where_the_way_turns() -> None:
    layout = chain(3, 2, 2, v=True)
    moves = [(each.src, each.dst) for actions in zb_v(layout).slots for each in actions if each.peer >= 0]
    assert (2, 3) not in moves
    assert (1, 2) in moves


def test_a_stage_that_is_not_split_has_no_second_half() -> None:
    layout = chain(2, 2, 2, v=True)
    program = zero_bubble_v(layout, {0})
    check(program)
    weights = [each for actions in program.slots for each in actions if each.kind is ActionKind.WEIGHT]
    assert {each.stage for each in weights} == {0}


def test_slots_receive_in_the_order_of_the_sender() -> None:
    """Stage 3 needs stage 0's value long after stage 1, on the same slot, needs its own."""
    edges = ((0, 1), (0, 3), (1, 2), (2, 3))
    layout = Layout(2, 2, ((0,), (1,), (0,), (1,)), edges, edges)
    program = interleaved_1f1b(layout)
    check(program)
    received = [str(each) for each in program.slots[1] if each.kind is ActionKind.RECV_VALUES]
    assert received[:4] == ["RV0:0>1@0", "RV0:0>3@0", "RV1:0>1@0", "RV1:0>3@0"]


@pytest.mark.parametrize("make", [interleaved_1f1b, zb_v])
@pytest.mark.parametrize(
    "stages",
    [((0,), (1,)), ((0,), (1,), (1,), (0,), (1,), (0,)), ((0, 1), (1, 0))],
    ids=["one", "mixed", "other replica"],
)
def test_other_placements_are_refused(make: Make, stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlanError, match="are not placed as"):
        make(Layout(2, 1, stages, (), ()))


def test_schedules_of_one_stage_per_slot_refuse_several() -> None:
    with pytest.raises(PlanError, match=r"slot 0 has the stages \(0, 2\), where one is expected"):
        one_forward_one_backward(chain(2, 2, 1))


@pytest.mark.parametrize("backward", [False, True], ids=["asked", "inside"])
@given(interleaved(asked=True))
def test_a_call_without_a_single_loss_goes_stage_by_stage(backward: bool, case: tuple[Layout, Make]) -> None:
    layout = loss_layout(case[0]) if backward else case[0]
    program = gpipe(layout, interleaved=backward)
    check(program)
    for slot in range(layout.world):
        computed = [each for each in program.slots[slot] if each.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
        wanted = [(stage, piece) for stage in layout.stages_of(slot) for piece in layout.pieces(stage, slot)]
        assert [(layout.stage_at(slot, each), each.piece) for each in computed] == wanted + wanted[::-1]


def test_programs_to_run_are_made_by_name() -> None:
    layout = chain(2, 2, 2)
    assert planned_program(INTERLEAVED_1F1B, layout) == planned_program(INTERLEAVED_1F1B, layout)
    assert planned_program(INTERLEAVED_1F1B, layout) == interleaved_1f1b(layout)
    layout = chain(2, 2, 2, v=True)
    assert planned_program(ZB_V, layout, {1}) == zero_bubble_v(layout, {1})
    with pytest.raises(PlanError, match="are not placed as interleaved_1f1b needs them; place them with round_robin"):
        planned_program(INTERLEAVED_1F1B, layout)


@pytest.mark.parametrize("stages", [((0,), (1,), (0,)), ((0, 0), (1, 1)), ((0, 1), (0,), (0, 1))])
def test_slots_have_equally_many_stages(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlanError, match="each of 2 slots once; only if all slots are in equally many stages"):
        Layout(2, 1, stages, (), ())


def test_the_checker_sees_a_use_before_it_is_computed_on_the_same_slot() -> None:
    """No message would be missing: the value stays on the slot."""
    layout = chain(1, 2, 1)
    program = interleaved_1f1b(layout)
    check(program)
    first, second, *rest = program.slots[0]
    assert [str(first), str(second)] == ["F0.0", "F0.1"]
    with pytest.raises(PlanError, match=r"F0\.1 uses a value that it does not have yet"):
        check(Program(layout, ((second, first, *rest),), program.forward_length))


def test_reductions_of_a_slot_s_stages_are_apart() -> None:
    layout = chain(2, 2, 1)
    ends = [each for each in interleaved_1f1b(layout).slots[0] if each.kind is ActionKind.REDUCE]
    assert ends == [Action(ActionKind.REDUCE, stage=2), Action(ActionKind.REDUCE, stage=0)]
    costs = virtual(layout, reduce_us=((4.0,),) * 4)
    program = interleaved_1f1b(layout)
    plain, reduced = simulate(program, virtual(layout)), simulate(program, costs, record=True)
    later = next(each for each in reduced.events if each.name == "R.2")
    own = next(each for each in reduced.events if each.name == "R.0")
    # That of the later stage overlaps with the backward of the earlier one, which begins a reduction when it ends.
    assert later.start_us < plain.step_us - 2.0
    assert own.start_us == later.start_us + later.us
