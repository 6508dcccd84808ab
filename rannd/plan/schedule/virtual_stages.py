"""Schedules with several stages per slot: interleaved 1F1B and ZB-V.

All stages have equally many replicas, so each pipeline side by side has one slot for each *position*; a microbatch
passes the positions several times::

    4 positions, 2 stages each     interleaved 1F1B     0 4    1 5    2 6    3 7
                                   ZB-V                 0 7    1 6    2 5    3 4
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from rannd.errors import PlanError
from rannd.plan.schedule.program import ActionKind, Layout, Program
from rannd.plan.schedule.transfers import with_transfers

Slots = tuple[tuple[int, ...], ...]
"""Slot of each replica, by stage or by position."""


def round_robin(positions: Slots, passes: int) -> Slots:
    """Return the slots of each stage where stage s is at position s modulo their number, as interleaved 1F1B has it."""
    return positions * passes


def v_shape(positions: Slots) -> Slots:
    """Return the slots of each stage where a microbatch goes to the last position and back, as ZB-V has it."""
    return positions + positions[::-1]


def interleaved_1f1b(layout: Layout, *, ahead: int = 0) -> Program:
    """Interleaved 1F1B, Megatron-LM's order.

    As many microbatches as there are positions pass the slot's first stage, then its second, and so on. The last
    position begins with the forwards of all but its last stage, each earlier one with two more; then forward and
    backward take turns.

    Args:
        layout: Stages placed as `round_robin` does.
        ahead: More forwards before the first backward, which keep more microbatches and cover the time of transfers.

    Raises:
        PlanError: The stages are not placed so.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2.
    """
    count = _positions(layout, INTERLEAVED_1F1B)
    orders = []
    for slot in range(layout.world):
        stages = layout.stages_of(slot)
        pieces = layout.pieces(stages[0], slot)
        total, group = len(pieces) * len(stages), count * len(stages)
        forwards, backwards = [], []
        for number in range(total):
            turn, place = divmod(number, group)
            pass_, offset = divmod(place, count)
            piece = pieces[turn * count + offset]
            forwards.append(layout.computation(ActionKind.FORWARD, piece, stages[pass_]))
            backwards.append(layout.computation(ActionKind.BACKWARD, piece, stages[-1 - pass_]))
        first = min(2 * (count - stages[0] - 1) + (len(stages) - 1) * count + ahead, total)
        order = forwards[:first]
        for forward, backward in zip(forwards[first:], backwards, strict=False):
            order += [forward, backward]
        orders.append([*order, *backwards[total - first :]])
    return with_transfers(layout, orders, interleaved=True)


def zero_bubble_v(layout: Layout, split: Collection[int]) -> Program:
    """ZB-V: two stages per slot, placed so that the last stage is on the first slot; gradients of parameters may wait.

    With F = B = W and transfers that take no time, a slot is never idle between its first and its last computation, and
    keeps no more activations than the first of as many slots under 1F1B.

    Args:
        layout: Stages placed as `v_shape` does.
        split: Stages whose backward is split into two halves.

    Raises:
        PlanError: The stages are not placed so.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 6; the order is that of
    ``ScheduleZBVZeroBubble`` of torch.distributed.pipelining.
    """
    count = _positions(layout, ZB_V)
    orders = []
    for slot in range(layout.world):
        stages = layout.stages_of(slot)
        pieces = layout.pieces(stages[0], slot)
        order = [
            layout.computation(kind, pieces[number], stages[pass_])
            for kind, pass_, number in _v_order(count, stages[0], max(len(pieces), 2 * count - 1))
            if number < len(pieces) and (kind is not ActionKind.WEIGHT or stages[pass_] in split)
        ]
        orders.append(order)
    return with_transfers(layout, orders, interleaved=True)


_Turn = tuple[ActionKind, int, int]
"""Kind of computation, whether it is on the way back, number of the microbatch."""


def _v_order(count: int, position: int, pieces: int) -> Sequence[_Turn]:
    """Order of the slot at `position` of `count`, for at least 2 `count` - 1 microbatches."""
    forward, backward, weight = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
    done = {(kind, way): 0 for kind in (forward, backward, weight) for way in (0, 1)}
    order: list[_Turn] = []

    def add(way: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            order.append((kind, way, done[kind, way]))
            done[kind, way] += 1

    for _ in range(2 * (count - position) - 1):
        add(0, forward)
    for _ in range(position):
        add(1, forward)
        add(0, forward)
    for _ in range(count - position):
        add(1, forward, backward, weight)
    while done[forward, 1] < done[forward, 0] or done[forward, 0] < pieces:
        if done[forward, 0] < pieces:
            add(0, forward)
        add(0, backward, weight)
        add(1, forward, backward, weight)
    for _ in range(position):
        add(0, backward)
        add(1, backward)
    for _ in range(count - position):
        add(0, backward, weight)
    for way in (1, 0):
        while done[weight, way] < done[backward, way]:
            add(way, weight)
    return order


INTERLEAVED_1F1B, ZB_V = "interleaved_1f1b", "zb_v"
"""Names of these schedules."""


class VirtualSchedule(msgspec.Struct, frozen=True):
    """A schedule with several stages per slot."""

    name: str
    program: Callable[[Layout, Collection[int]], Program]
    """Makes the Program of a step whose backward needs no gradients from the ranks, from a layout and the stages whose
    backward may be split."""
    placed: Callable[[Slots, int], Slots]
    """Slots of each stage, from those of each position and the number of stages per slot."""
    delays_weights: bool
    """Whether gradients of parameters may wait in the stages whose backward is split."""
    zero: tuple[int, ...]
    """ZeRO stages with which it can be run: 2 and 3 shard gradients as soon as they are computed."""

    def problem(self, stages: Slots) -> str:
        """Return what is wrong with the slots of the stages of a layout, or ''."""
        passes = sum(map(len, stages)) // max(len({slot for slots in stages for slot in slots}), 1)
        if passes < 2 or self.placed(stages[: len(stages) // passes], passes) != stages:
            return f"stages {stages} with {passes} per slot are not placed as {self.name} needs them"
        return ""


VIRTUAL_SCHEDULES: Mapping[str, VirtualSchedule] = {
    each.name: each
    for each in (
        VirtualSchedule(
            INTERLEAVED_1F1B,
            lambda layout, split: interleaved_1f1b(layout),
            round_robin,
            delays_weights=False,
            zero=(1, 2, 3),
        ),
        VirtualSchedule(
            ZB_V, zero_bubble_v, lambda positions, passes: v_shape(positions), delays_weights=True, zero=(1,)
        ),
    )
}
"""Every schedule with several stages per slot, by name. The runtime can run all of them."""


def _positions(layout: Layout, schedule: str) -> int:
    """Return the number of positions of a layout; PlanError if its stages are not placed as the schedule needs them."""
    problem = VIRTUAL_SCHEDULES[schedule].problem(layout.stages)
    if problem:
        raise PlanError(f"{problem}; place them with round_robin or v_shape of virtual_stages.py")
    return len(layout.stages) // layout.virtual_stages
