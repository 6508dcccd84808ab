"""The schedules: the order of computations of each slot, and the one table of what the planner has to know of each.

All of them support any layout with one stage per slot: unequal numbers of replicas, values that skip stages, tied
weights. To add one, add a line to `ALL_SCHEDULES`; nothing else in rannd compares a schedule's name. Those with several
stages per slot have a table of their own, `VIRTUAL_SCHEDULES` in `virtual_stages.py`; programs are made here for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from rannd.errors import PlanError
from rannd.plan.schedule.greedy import greedy_orders
from rannd.plan.schedule.program import ActionKind, Layout, Program
from rannd.plan.schedule.transfers import with_transfers
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES


def gpipe(layout: Layout, *, interleaved: bool = False) -> Program:
    """All forwards in ascending order of microbatches, then all backwards in descending order (GPipe's schedule).

    A slot with several stages runs all microbatches through the first of them, then through the next; and backwards.

    `interleaved`: backward belongs to the forward phase, see :func:`rannd.plan.schedule.transfers.with_transfers`.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).
    """
    orders = []
    for slot in range(layout.world):
        work = [(stage, piece) for stage in layout.stages_of(slot) for piece in layout.pieces(stage, slot)]
        forwards = [layout.computation(ActionKind.FORWARD, piece, stage) for stage, piece in work]
        backwards = [layout.computation(ActionKind.BACKWARD, piece, stage) for stage, piece in reversed(work)]
        orders.append([*forwards, *backwards])
    return with_transfers(layout, orders, interleaved=interleaved)


def one_forward_one_backward(layout: Layout) -> Program:
    """1F1B: each slot runs backwards as early as possible to keep few microbatches (PipeDream-Flush, interleaved).

    A slot of stage s has at most :func:`window` microbatches in flight; the order is that of ``greedy``. With one
    replica per stage it is the well-known order, but with one more forward ahead: ``F0 F1 F2 B0 F3 B1 ...`` in the
    first of two stages.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    return with_transfers(layout, greedy_orders(layout, _windows(layout)), interleaved=True)


def zero_bubble_h1(layout: Layout, split: Collection[int]) -> Program:
    """ZB-H1: 1F1B that delays parameter gradients until a slot would be idle or keeps too much (interleaved).

    `split`: the stages whose backward is split into two halves. Between forward and second half a slot has at most as
    many microbatches as the first stage has under 1F1B, so the fullest device needs no more memory.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.2.
    """
    whole = [-(-layout.world // len(slots)) + (len(layout.stages) > 1) for slots in layout.stages]
    delayed = split if len(layout.stages) > 1 else ()  # one stage waits for nobody
    return with_transfers(layout, greedy_orders(layout, _windows(layout), delayed, whole), interleaved=True)


def window(layout: Layout, stage: int) -> int:
    """Return the maximum number of microbatches that a slot of `stage` keeps in flight under 1F1B.

    A microbatch is in flight while all later stages run it, and a stage with R replicas takes R times as long for one
    as a stage of equal weight with one replica. One more covers the time of transfers: without it every slot waits for
    two of them in every round.
    """
    return _windows(layout)[stage]


def _windows(layout: Layout) -> list[int]:
    found = [1] * len(layout.stages)
    later = len(layout.stages[-1])
    for stage in range(len(layout.stages) - 2, -1, -1):
        own = len(layout.stages[stage])
        later += own
        found[stage] = -(-later // own) + 1
    return found


class Schedule(msgspec.Struct, frozen=True):
    """A schedule: its order of computations, and the properties that the planner reads."""

    name: str
    program: Callable[[Layout, Collection[int]], Program]
    """Makes the Program of a step whose backward needs no gradients from the ranks, from a layout and the stages whose
    backward may be split."""
    takes_turns: bool
    """Whether forward and backward take turns: a stage keeps at most :func:`window` microbatches, and E counts the
    longest round of both. Otherwise it keeps all of its microbatches, and E counts forward and backward apart."""
    delays_weights: bool
    """Whether gradients of parameters wait until a slot would be idle: a stage whose backward is split keeps as many
    microbatches as the first would, and E takes the waiting part out of fill and drain."""
    zero: tuple[int, ...]
    """ZeRO stages that it can be combined with."""


_TABLE = (
    Schedule(
        "1f1b",
        lambda layout, split: one_forward_one_backward(layout),
        takes_turns=True,
        delays_weights=False,
        zero=(1, 2, 3),
    ),
    Schedule(
        "gpipe",
        lambda layout, split: gpipe(layout, interleaved=True),
        takes_turns=False,
        delays_weights=False,
        zero=(1, 2, 3),
    ),
    # ZeRO 2 and 3 shard parameter gradients as soon as they are computed, and these are delayed.
    Schedule("zb_h1", zero_bubble_h1, takes_turns=True, delays_weights=True, zero=(1,)),
)
ALL_SCHEDULES: Mapping[str, Schedule] = {each.name: each for each in _TABLE}
"""Every schedule by name."""

DEFAULT_SCHEDULE = "1f1b"
"""Name of the schedule that plans are searched for where none is asked for."""

DELAYING = tuple(each.name for each in _TABLE if each.delays_weights)
"""Names of those that the best of these plans are compared with: the same order of work, but for what is delayed."""

SCHEDULES = tuple(ALL_SCHEDULES)
"""Names of the schedules with one stage per slot."""

ASKED_SCHEDULE = "gpipe"
"""Name of the schedule of calls whose backward the script asks for, so that it cannot begin inside the call."""


def planned_program(schedule: str, layout: Layout, split: Collection[int] = ()) -> Program:
    """Return the Program of a step under any schedule, with one stage per slot or several.

    `split`: the stages whose backward may be split (see StepCosts.split).

    Raises:
        PlanError: The schedule is not known, or the stages are not placed as it needs them.
    """
    names = (*ALL_SCHEDULES, *VIRTUAL_SCHEDULES)
    if schedule not in names:
        raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(names)}")
    return (ALL_SCHEDULES.get(schedule) or VIRTUAL_SCHEDULES[schedule]).program(layout, split)
