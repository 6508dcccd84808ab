"""The schedules: in which order each slot computes, and which of them can be run.

All of them take any layout: stages of unequal replica counts, values that skip stages, tied weights. One table says
which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.greedy import greedy_orders
from rannd.plan.schedule.program import Action, ActionKind, Layout, Program
from rannd.plan.schedule.transfers import with_transfers


def fill_drain(layout: Layout, *, interleaved: bool = False) -> Program:
    """All forwards in increasing order of pieces, then all backwards in decreasing order (GPipe's schedule).

    `interleaved`: backward belongs to the forward phase, see :func:`rannd.plan.schedule.transfers.with_transfers`.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).
    """
    orders = []
    for slot in range(layout.world):
        pieces = layout.pieces(layout.stage_of(slot), slot)
        forwards = [Action(ActionKind.FORWARD, piece) for piece in pieces]
        orders.append([*forwards, *(Action(ActionKind.BACKWARD, piece) for piece in reversed(pieces))])
    return with_transfers(layout, orders, interleaved=interleaved)


def one_forward_one_backward(layout: Layout) -> Program:
    """Each slot runs a piece backward as early as it can, and so keeps few pieces (1F1B, PipeDream-Flush, interleaved).

    A slot of stage s has at most :func:`window` pieces in flight; the order is that of ``greedy``'s machine. With one
    replica a stage it is the known order, but for one more forward ahead: ``F0 F1 F2 B0 F3 B1 ...`` in the first of two
    stages.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    return with_transfers(layout, greedy_orders(layout, _windows(layout)), interleaved=True)


def zero_bubble_h1(layout: Layout, split: Collection[int]) -> Program:
    """1F1B whose gradients of parameters wait until a slot would be idle, or keeps too much (ZB-H1, interleaved).

    `split`: the stages whose backward comes in two halves. Between forward and second half a slot has at most as many
    pieces as under 1F1B the first stage would have, so the fullest device needs no more memory.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.2.
    """
    whole = [-(-layout.world // len(slots)) + (len(layout.stages) > 1) for slots in layout.stages]
    return with_transfers(layout, greedy_orders(layout, _windows(layout), split, whole), interleaved=True)


def window(layout: Layout, stage: int) -> int:
    """Most pieces that a slot of `stage` keeps in flight under 1F1B.

    A piece is away for as long as it takes all later stages, and a stage with R replicas takes R times as long for a
    piece as one of equal weight with one. On top comes one piece, which covers the time that transfers take: without
    it every slot waits for two of them in every round.
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


ALL_SCHEDULES: Mapping[str, Callable[[Layout, Collection[int]], Program]] = {
    "1f1b": lambda layout, split: one_forward_one_backward(layout),
    "fill_drain": lambda layout, split: fill_drain(layout, interleaved=True),
    "zb_h1": zero_bubble_h1,
}
"""Every schedule by its name: the Program of a step whose backward needs nothing from the ranks, from a layout and the
stages whose backward may come in two halves. Which of them can be run is said in ways.py."""


def planned_program(schedule: str, layout: Layout, split: Collection[int] = ()) -> Program:
    """The Program of a step under any schedule, to look at and to simulate. PlanError for one not known.

    `split`: the stages whose backward may come in two halves (those with a time for it: see StepCosts.split).
    """
    if schedule not in ALL_SCHEDULES:
        raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(ALL_SCHEDULES)}")
    return ALL_SCHEDULES[schedule](layout, split)


def interleaved_program(schedule: str, layout: Layout) -> Program:
    """The Program of a step that is to be run. PlanError for a schedule that is not known, or cannot be run."""
    if schedule in ALL_SCHEDULES and schedule not in SCHEDULES:
        raise PlanError(
            f"schedule {schedule!r} can be planned and simulated, but not be run yet; use one of {', '.join(SCHEDULES)}"
        )
    if schedule not in SCHEDULES:
        raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(SCHEDULES)}")
    return planned_program(schedule, layout)
