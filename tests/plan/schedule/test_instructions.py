"""Instructions keep what the checked Program promises: all actions, their order, the order of each pair's transfers."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_layouts import interleaved, layouts

from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.instructions import Posting, instructions
from rannd.plan.schedule.program import AHEAD, SENDS, TRANSFERS, Action, ActionKind, Layout, Program
from rannd.plan.schedule.schedules import gpipe, planned_program
from rannd.plan.simulate.layout import loss_layout

RECEIVES = TRANSFERS - SENDS


def programs(layout: Layout, schedule: str | None) -> Program:
    if schedule is None:
        return gpipe(layout)
    return planned_program(schedule, loss_layout(layout), range(0, len(layout.stages), 2))


def pair(program: Program, action: Action, posting: Posting) -> tuple[int, bool, bool]:
    """What has one order on both sides: with MATCHED, or several stages per slot, the directions of a pair are
    apart."""
    gradients = action.kind in (ActionKind.SEND_GRADS, ActionKind.RECV_GRADS)
    apart = posting is Posting.MATCHED or program.layout.virtual_stages > 1
    return action.peer, gradients, apart and action.kind in SENDS


@st.composite
def steps(draw: st.DrawFn) -> Program:
    """Steps with one stage per slot, and with several."""
    if draw(st.booleans()):
        return programs(draw(layouts()), draw(st.sampled_from([None, *SCHEDULES])))
    if draw(st.booleans()):
        return gpipe(draw(interleaved(asked=True))[0])
    layout, make = draw(interleaved())
    return make(layout)


@given(steps(), st.sampled_from(Posting))
def test_nothing_is_lost_and_the_orders_stay(program: Program, posting: Posting) -> None:
    for slot in range(program.layout.world):
        for slots in program.phases:
            actions, listed = slots[slot], instructions(slots, slot, posting)
            done = [each.action for each in listed if each.action is not None]
            assert done == [action for action in actions if action.kind not in RECEIVES]
            wanted, found = defaultdict(list), defaultdict(list)
            for action in actions:
                if action.kind in TRANSFERS:
                    wanted[pair(program, action, posting)].append(action)
            posted: set[Action] = set()
            arrived: set[Action] = set()
            for each in listed:
                for action in each.posts:
                    found[pair(program, action, posting)].append(action)
                    posted.add(action)
                assert posted.issuperset(each.awaits)
                arrived.update(each.awaits)
                if each.action is not None and each.action.kind in SENDS:
                    found[pair(program, each.action, posting)].append(each.action)
            assert found == wanted
            assert arrived == posted == {action for action in actions if action.kind in RECEIVES}


@given(steps(), st.sampled_from(Posting))
def test_what_a_computation_needs_is_awaited_before_it(program: Program, posting: Posting) -> None:
    layout = program.layout
    for slot in range(layout.world):
        for slots in program.phases:
            actions = slots[slot]
            arrived: set[Action] = set()
            for each in instructions(slots, slot, posting):
                arrived.update(each.awaits)
                if each.action is None:
                    continue
                for action in actions:
                    stage = action.dst if action.kind is ActionKind.RECV_VALUES else action.src
                    kind = ActionKind.FORWARD if action.kind is ActionKind.RECV_VALUES else ActionKind.BACKWARD
                    if action.kind not in RECEIVES or stage not in layout.stages_of(slot):
                        continue
                    if each.action == layout.computation(kind, action.piece, stage):
                        assert action in arrived


@given(steps(), st.sampled_from(Posting))
def test_what_is_let_go_of_was_taken_by_its_receiver(program: Program, posting: Posting) -> None:
    """Plays all slots: a slot goes on when what it awaits was sent, and nobody settles what was not awaited yet."""
    layout = program.layout
    for slots in program.phases:
        lists = [instructions(slots, slot, posting) for slot in range(layout.world)]
        sent: set[tuple[int, Action]] = set()  # (sender, send)
        taken: set[tuple[int, Action]] = set()
        settled: set[tuple[int, Action]] = set()
        places = [0] * layout.world
        moved = True
        while moved:
            moved = False
            for slot in random.Random(len(settled)).sample(range(layout.world), layout.world):
                if places[slot] == len(lists[slot]):
                    continue
                each = lists[slot][places[slot]]
                awaited = {(action.peer, _sender_of(action, slot)) for action in each.awaits}
                if not awaited <= sent:
                    continue
                taken |= awaited
                for action in each.settles:
                    assert action.kind in SENDS
                    assert (slot, action) in taken
                    assert (slot, action) not in settled
                    settled.add((slot, action))
                if each.action is not None and each.action.kind in SENDS:
                    sent.add((slot, each.action))
                places[slot] += 1
                moved = True
        assert places == [len(each) for each in lists]


def _sender_of(action: Action, slot: int) -> Action:
    kind = ActionKind.SEND_VALUES if action.kind is ActionKind.RECV_VALUES else ActionKind.SEND_GRADS
    return Action(kind, action.piece, action.src, action.dst, slot)


def test_receives_of_a_pipeline_are_posted_ahead() -> None:
    layout = Layout(2, 2, ((0,), (1,)), ((0, 1),), ((0, 1),))
    program = planned_program("1f1b", layout)
    listed = instructions(program.phases[0], 1)
    done = 0  # computations so far
    posted: dict[Action, int] = {}
    for each in listed:
        posted.update(dict.fromkeys(each.posts, done))
        for action in each.awaits:
            assert posted[action] == max(done - AHEAD, 0)
        done += each.action is not None and each.action.kind not in TRANSFERS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_that_were_answered_are_let_go(schedule: str) -> None:
    layout = Layout(2, 2, ((0,), (1,)), ((0, 1),), ((0, 1),))
    listed = instructions(planned_program(schedule, layout).phases[0], 0)
    sent = [each.action for each in listed if each.action is not None and each.action.kind is ActionKind.SEND_VALUES]
    assert sorted(map(str, sent)) == sorted(str(action) for each in listed for action in each.settles)


def test_gradients_do_not_pile_up() -> None:
    layout = Layout(2, 16, ((0,), (1,)), ((0, 1),), ((0, 1),))
    most = waiting = 0
    for each in instructions(planned_program("1f1b", layout).phases[0], 1):
        waiting += each.action is not None and each.action.kind is ActionKind.SEND_GRADS
        waiting -= sum(action.kind is ActionKind.SEND_GRADS for action in each.settles)
        most = max(most, waiting)
    assert most <= 4
