from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_costs import chain, virtual
from plan_instances import Instance
from plan_layouts import Make, interleaved, layouts

from rannd.errors import PlanError
from rannd.plan.schedule.program import ActionKind, Layout, Program
from rannd.plan.schedule.program_text import from_text
from rannd.plan.schedule.schedules import (
    ALL_SCHEDULES,
    gpipe,
    one_forward_one_backward,
    planned_program,
    zero_bubble_h1,
)
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.simulator import Simulation, predict, simulate
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, REDUCE

PIPELINE = chain(2, 1)


def costs(**changes: object) -> StepCosts:
    return virtual(PIPELINE, unit=10.0, kept_bytes=(5, 7), weight_bytes=(5, 7), **changes)


# -- time -----------------------------------------------------------------------------------------------------


def test_two_stages_two_pieces() -> None:
    # slot 0: F0 F1 . . . . . B1B1 B0B0      0         10        20        30 ..
    # slot 1: .  F0 F1 B1B1 B0B0 . .         forward ends at 30, backward takes 20 + 20 + 20
    assert simulate(gpipe(PIPELINE), costs()) == Simulation(
        step_us=90, busy_us=(60, 60), idle_us=(30, 30), peak_bytes=(10, 14), drain_us=(0, 0)
    )
    assert simulate(gpipe(PIPELINE), costs()).bubble == pytest.approx(1 / 3)


def test_transfers_overlap_with_computing() -> None:
    # slot 0: F0 at 0..10, F1 ..20; messages at 10..13 and 20..23; slot 1: F0 13..23, F1 ..33, B1 ..53, B0 ..73;
    # gradients at 53..57 and 73..77; slot 0: B1 57..77, B0 ..97.
    result = simulate(gpipe(PIPELINE), costs(values_us={(0, 1): 3.0}, grads_us={(0, 1): 4.0}))
    assert result.step_us == 97


def test_every_action_may_take_the_host_s_time() -> None:
    # slot 0: F0 and its send 0..20, F1 ..40; slot 1: a receive, F0 20..40, B0 and its send ..70, F1 ..90, B1 ..120;
    # slot 0: a receive, B0 70..100, B1 120..150.
    program = from_text(
        "world 2 microbatches 1\nstages 0 | 1\nedges 0>1*\n"
        "slot 0: F0 SV0:0>1@1 F1 SV1:0>1@1 RG0:0>1@1 B0 RG1:0>1@1 B1 R |\n"
        "slot 1: RV0:0>1@0 F0 B0 SG0:0>1@0 RV1:0>1@0 F1 B1 SG1:0>1@0 R |\n"
    )
    assert simulate(program, costs()).step_us == 90
    result = simulate(program, costs(host_us=5.0))
    assert result.step_us == 150
    assert result.busy_us == (100, 100)


def test_bytes_of_messages_may_take_the_host_s_time_on_both_sides() -> None:
    # slot 0: F0 and 3 bytes 0..13, F1 ..26; slot 1: the same bytes and F0 13..26, F1 26..39, B1 and 4 bytes ..63,
    # B0 ..87; slot 0: these bytes and B1 63..87, B0 87..111.
    sizes = {"values_bytes": {(0, 1): 3}, "grads_bytes": {(0, 1): 4}}
    result = simulate(gpipe(PIPELINE), costs(byte_us=1.0, **sizes))
    assert (result.step_us, result.busy_us) == (111, (74, 74))


def test_a_link_carries_one_message_at_a_time() -> None:
    # Messages at 10..35 and 35..60 though the second one is there at 20; slot 1: F0 35..45, F1 60..70, B1 ..90,
    # B0 ..110; slot 0: B1 90..110, B0 ..130.
    assert simulate(gpipe(PIPELINE), costs(values_us={(0, 1): 25.0})).step_us == 130


def test_inputs_travel_both_ways_at_once() -> None:
    layout = Layout(2, 1, ((0,), (1,)), ((-1, 0), (-1, 1)), ())
    moves = {(-1, 0): 7.0, (-1, 1): 8.0}
    result = simulate(gpipe(layout), virtual(layout, unit=10.0, values_us=moves))
    # Slot 1 gets piece 0 and gives piece 1; slot 0 has its own piece, while piece 1 is on its way.
    assert result.step_us == 8 + 2 * 10 + 2 * 20
    assert result.idle_us == (8, 8)


def test_outputs_hold_up_only_the_end_of_a_phase() -> None:
    layout = chain(2, 1, edges=((0, 1), (1, 2)))
    result = simulate(
        one_forward_one_backward(layout), virtual(layout, unit=10.0, values_us={(0, 1): 0.0, (1, 2): 500.0})
    )
    # Slot 1 sends the output of piece 0 when it has computed all: at 70.
    assert result.step_us == 70 + 500


def test_far_slots_take_the_slower_link() -> None:
    far = costs(values_us={(0, 1): 3.0}, far_values_us={(0, 1): 30.0}, nodes=(0, 1))
    same = costs(values_us={(0, 1): 3.0}, far_values_us={(0, 1): 30.0}, nodes=(0, 0))
    slow = costs(values_us={(0, 1): 30.0})
    assert simulate(gpipe(PIPELINE), far) == simulate(gpipe(PIPELINE), slow)
    assert simulate(gpipe(PIPELINE), same).step_us < simulate(gpipe(PIPELINE), far).step_us


def test_a_program_that_hangs_is_an_error() -> None:
    hanging = from_text(
        "world 2 microbatches 1\nstages 0 | 1\nedges 0>1\nslot 0: F0 F1 | R\nslot 1: RV0:0>1@0 F0 | R\n"
    )
    with pytest.raises(PlanError, match="never ends: slot 1 at RV0:0>1@0"):
        simulate(hanging, costs())


# -- reductions -----------------------------------------------------------------------------------------------


def test_a_reduction_waits_for_all_replicas_of_its_stage() -> None:
    layout = Layout(3, 1, ((0, 1), (2,)), ((0, 1),), ())
    given = virtual(layout, forward_us=(10.0, 1.0), backward_us=(20.0, 20.0), reduce_us=((100.0,), ()))
    result = simulate(gpipe(layout), given)
    # Slot 0 has pieces 0 and 1: 2 * (10 + 20), and the reduction; slot 2 has three pieces to take.
    assert result.step_us == 160
    assert result.busy_us == (60, 30, 63)
    assert result.drain_us == (100, 130, 0), "slot 1 has one piece less"


def test_buckets_are_reduced_while_the_last_backward_runs() -> None:
    layout = Layout(2, 1, ((0, 1),), (), ())
    # Forward 2, backward from 2 to 6; four buckets, complete at 3, 4, 5, 6.
    fast, slow = virtual(layout, reduce_us=((0.5,) * 4,)), virtual(layout, reduce_us=((3.0,) * 4,))
    assert simulate(gpipe(layout), fast).step_us == 6 + 0.5
    assert simulate(gpipe(layout), slow).step_us == 3 + 4 * 3
    assert predict("gpipe", layout, slow).drain_us == (3 + 4 * 3 - 6,) * 2
    assert simulate(gpipe(layout), virtual(layout, after_us=(7.0,))).drain_us == (7, 7)
    assert simulate(gpipe(layout), virtual(layout, reduce_us=((12.0,),))).step_us == 6 + 12


def test_gradients_of_a_split_backward_come_with_its_second_half() -> None:
    layout = Layout(2, 1, ((0, 1),), (), ())
    given = virtual(layout, reduce_us=((0.5,) * 4,))
    # Forward ends at 2, the first half of backward at 4, the second one runs from 4 to 6.
    assert simulate(zero_bubble_h1(layout, {0}), given).step_us == 6 + 0.5


def test_tied_weights_are_reduced_over_all_stages_that_hold_them() -> None:
    layout = chain(2, 1, tied=((0, 1),))
    given = virtual(layout, unit=10.0, tied_us=((100.0,),))
    assert simulate(gpipe(layout), given).step_us == 90 + 100


def test_a_slot_reduces_one_set_of_gradients_after_the_other() -> None:
    layout = Layout(4, 1, ((0, 1), (2, 3)), ((0, 1),), ((0, 1),), ((0, 1),))
    alone = simulate(gpipe(layout), virtual(layout)).step_us
    given = virtual(layout, reduce_us=((5.0,), (7.0,)), tied_us=((11.0,),))
    result = simulate(gpipe(layout), given, record=True)
    assert result.step_us == alone + 5 + 11 + 7
    names = [event.name for event in result.events if event.category == REDUCE and event.slot == 3]
    assert names == ["R0", "R"]


# -- memory ---------------------------------------------------------------------------------------------------


def test_recompute_keeps_one_piece_s_activations() -> None:
    result = simulate(gpipe(PIPELINE), msgspec.structs.replace(costs(), kept_bytes=(0, 7), working_bytes=(5, 0)))
    assert result.peak_bytes == (5, 14)


def test_state_is_held_all_the_time() -> None:
    assert simulate(gpipe(PIPELINE), costs(state_bytes=(1000, 2000))).peak_bytes == (1010, 2014)


def test_messages_have_memory_from_when_they_are_posted() -> None:
    layout = chain(2, 4)
    given = virtual(layout, kept_bytes=(0, 0), values_bytes={(0, 1): 100}, grads_bytes={(0, 1): 1})
    # Slot 1 runs F B F B ..: a piece's values, and those of the next one, posted two computations ahead.
    # Slot 0 ends with B B B ..: gradients of a piece, and of the next two.
    assert simulate(one_forward_one_backward(layout), given).peak_bytes == (3, 200)
    # All values of GPipe stay until backward.
    assert simulate(gpipe(layout), given).peak_bytes == (3, 800)


def test_the_rank_s_outputs_stay() -> None:
    layout = chain(2, 4, edges=((0, 1), (1, 2)))
    given = virtual(layout, kept_bytes=(0, 0), values_bytes={(0, 1): 0, (1, 2): 100})
    assert simulate(one_forward_one_backward(layout), given).peak_bytes == (400, 0)


def test_the_second_half_of_backward_keeps_its_part() -> None:
    layout = chain(2, 4)
    given = virtual(layout, kept_bytes=(10, 10), weight_bytes=(4, 4))
    program = zero_bubble_h1(layout, {0, 1})
    held, most = 0, [0, 0]
    for slot, actions in enumerate(program.slots):
        for action in actions:
            held += {ActionKind.FORWARD: 10, ActionKind.BACKWARD: 0, ActionKind.WEIGHT: -4}.get(action.kind, 0)
            most[slot] = max(most[slot], held)
            held -= 6 if action.kind is ActionKind.BACKWARD else 0
    assert simulate(program, given).peak_bytes == tuple(most)
    assert most[1] > 10  # 1F1B's last stage keeps one piece


# -- zero-bubble ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 4), (3, 2), (4, 2), (6, 2), (8, 1), (8, 4), (16, 2)])
def test_zero_bubble_h1_has_a_third_of_the_bubble_of_1f1b(stages: int, microbatches: int) -> None:
    """With F = B = W and no transfers: (S - 1) (F + B - W) beside (S - 1) (F + B + W), as the paper says."""
    layout = chain(stages, microbatches)
    idle = {
        schedule: sum(simulate(planned_program(schedule, layout, range(stages)), virtual(layout)).idle_us)
        for schedule in ALL_SCHEDULES
    }
    assert idle["1f1b"] == idle["gpipe"] == stages * (stages - 1) * 3
    assert idle["zb_h1"] == stages * (stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zero_bubble_h1_needs_no_more_memory_than_the_first_stage_of_1f1b(stages: int) -> None:
    layout = chain(stages, 3)
    given = virtual(layout)
    most = max(simulate(one_forward_one_backward(layout), given).peak_bytes)
    assert max(simulate(zero_bubble_h1(layout, range(stages)), given).peak_bytes) == most


# -- any layout -----------------------------------------------------------------------------------------------


@given(layouts(), st.sampled_from([*ALL_SCHEDULES, "asked"]), st.randoms(use_true_random=False))
def test_timelines_keep_to_what_a_machine_can_do(layout: Layout, schedule: str, random: Random) -> None:
    """No slot computes two things at once, no link carries two messages at once, nothing is used before it is there."""
    costs = random_step_costs(layout, random)
    if schedule == "asked":
        program = gpipe(layout)
    else:
        layout = loss_layout(layout)
        program = planned_program(schedule, layout, costs.split)
    result = simulate(program, costs, record=True)
    check_timeline(program, costs, result)


@given(interleaved(), st.randoms(use_true_random=False))
def test_timelines_of_interleaved_stages_keep_to_it_too(case: tuple[Layout, Make], random: Random) -> None:
    layout, make = case
    costs = random_step_costs(layout, random)
    program = make(layout)
    check_timeline(program, costs, simulate(program, costs, record=True))


def random_step_costs(layout: Layout, random: Random) -> StepCosts:
    def numbers(count: int) -> tuple[float, ...]:
        return tuple(float(random.choice([0, 1, 3, 10])) for _ in range(count))

    count = len(layout.stages)
    return virtual(
        layout,
        forward_us=numbers(count),
        backward_us=tuple(us + 10 for us in numbers(count)),
        weight_us=numbers(count),
        values_us=dict(zip(layout.edges, numbers(len(layout.edges)), strict=True)),
        grads_us=dict(zip(layout.edges, numbers(len(layout.edges)), strict=True)),
        reduce_us=tuple(numbers(random.randint(0, 3)) for _ in range(count)),
        tied_us=tuple(numbers(1) for _ in layout.tied),
        state_bytes=tuple(random.randint(0, 9) for _ in range(count)),
        values_bytes={edge: random.randint(0, 9) for edge in layout.edges},
        grads_bytes={edge: random.randint(0, 9) for edge in layout.edges},
    )


def check_timeline(program: Program, costs: StepCosts, result: Simulation) -> None:
    layout = program.layout
    computed = {(each.slot, each.name): each for each in result.events if each.category == COMPUTE}
    received = {(each.slot, each.name): each for each in result.events if each.category == RECEIVE}
    links: dict[tuple[int, str], float] = {}
    for slot, actions in enumerate(program.slots):
        clock = 0.0
        for action in actions:
            event = computed.get((slot, str(action)))
            if event is not None:
                assert event.start_us >= clock
                clock = event.start_us + event.us
        assert clock <= result.step_us
        for action in actions:
            event = received.get((slot, str(action)))
            if event is None:
                continue
            forward = action.kind is ActionKind.RECV_VALUES
            kind = ActionKind.FORWARD if forward else ActionKind.BACKWARD
            home, reader = (action.src, action.dst) if forward else (action.dst, action.src)
            maker = computed.get((action.peer, str(layout.computation(kind, action.piece, home))))
            if (action.src >= 0) if forward else (action.dst < len(layout.stages)):
                assert maker is not None
                assert event.start_us >= maker.start_us + maker.us
            user = computed.get((slot, str(layout.computation(kind, action.piece, reader))))
            if reader in layout.stages_of(slot):
                assert user is not None
                assert user.start_us >= event.start_us + event.us
            assert event.start_us + event.us <= result.step_us
    for event in sorted(received.values(), key=lambda each: (each.start_us, each.us)):
        link = (event.slot, event.name.split("@")[1])
        assert event.start_us >= links.get(link, 0.0)
        links[link] = event.start_us + event.us
    assert len(received) == sum(
        action.kind in (ActionKind.RECV_VALUES, ActionKind.RECV_GRADS) for s in program.slots for action in s
    )
    assert math.fsum(result.busy_us) == pytest.approx(math.fsum(each.us for each in computed.values()))


# -- deployments ----------------------------------------------------------------------------------------------


def test_activations_are_at_most_what_the_estimate_says_and_mostly_that() -> None:
    equal, stages = 0, 0
    for seed in range(100):
        instance = Instance(seed)
        deployment = instance.plan(math.ceil(instance.reference.smallest_memory() * 1.1))
        given = step_costs(instance.graph, deployment, instance.costs.link)
        sent = [stage.estimate.output_bytes for stage in deployment.stages]
        alone = msgspec.structs.replace(
            given,
            state_bytes=(0,) * len(sent),
            kept_bytes=tuple(kept - size for kept, size in zip(given.kept_bytes, sent, strict=True)),
            values_bytes=dict.fromkeys(given.values_bytes, 0),
            grads_bytes=dict.fromkeys(given.grads_bytes, 0),
        )
        program = planned_program(deployment.schedule, loss_layout(layout_of(instance.graph, deployment)))
        peaks = simulate(program, alone).peak_bytes
        for stage in deployment.stages:
            most = max(peaks[slot] for slot in stage.slots)
            rounded = instance.world * deployment.microbatches  # each piece's bytes are
            planned = stage.estimate.activation_bytes + stage.estimate.working_bytes
            assert most <= planned + rounded, seed
            equal += abs(most - planned) <= rounded
            stages += 1
    assert equal > 0.8 * stages
