"""The schedules: the order of computations of each slot, and which schedules can be run.

All of them support any layout: stages with unequal numbers of replicas, values that skip stages, tied weights. To add
one, add it to `ALL_SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rannd.errors import PlanError
from rannd.plan.run_modes import SCHEDULES
from rannd.plan.schedule.greedy import greedy_orders
from rannd.plan.schedule.program import Action, ActionKind, Layout, Program
from rannd.plan.schedule.transfers import with_transfers


def fill_drain(layout: Layout, *, interleaved: bool = False) -> Program:
    """All forwards in ascending order of microbatches, then all backwards in descending order (GPipe's schedule).

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
    """1F1B: each slot runs backwards as early as possible to keep few microbatches (PipeDream-Flush, interleaved).

    A slot of stage s has at most :func:`window` microbatches in flight; the order is that of ``greedy``. With one
    replica
    per stage it is the well-known order, but with one more forward ahead: ``F0 F1 F2 B0 F3 B1 ...`` in the first of two
    stages.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    return with_transfers(layout, greedy_orders(layout, _windows(layout)), interleaved=True)


def zero_bubble_h1(layout: Layout, split: Collection[int]) -> Program:
    """ZB-H1: 1F1B that delays parameter gradients until a slot would be idle or keeps too much (interleaved).

    `split`: the stages whose backward is split into two halves. Between forward and second half a slot has at most as
    many
    microbatches as the first stage has under 1F1B, so the fullest device needs no more memory.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.2.
    """
    whole = [-(-layout.world // len(slots)) + (len(layout.stages) > 1) for slots in layout.stages]
    return with_transfers(layout, greedy_orders(layout, _windows(layout), split, whole), interleaved=True)


def window(layout: Layout, stage: int) -> int:
    """Return the maximum number of microbatches that a slot of `stage` keeps in flight under 1F1B.

    A microbatch is in flight while all later stages run it, and a stage with R replicas takes R times as long for one
    as a
    stage of equal weight with one replica. One more covers the time of transfers: without it every slot waits for two
    of
    them in every round.
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
"""Every schedule by name: makes the Program of a step whose backward needs no gradients from the ranks, from a layout
and the stages whose backward may be split. run_modes.py says which of them can be run."""


def planned_program(schedule: str, layout: Layout, split: Collection[int] = ()) -> Program:
    """Return the Program of a step under any schedule, for display and simulation.

    `split`: the stages whose backward may be split (see StepCosts.split).

    Raises:
        PlanError: The schedule is not known.
    """
    if schedule not in ALL_SCHEDULES:
        raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(ALL_SCHEDULES)}")
    return ALL_SCHEDULES[schedule](layout, split)


def interleaved_program(schedule: str, layout: Layout) -> Program:
    """Return the Program of a step to run; PlanError if the schedule is not known or cannot be run."""
    if schedule in ALL_SCHEDULES and schedule not in SCHEDULES:
        raise PlanError(
            f"schedule {schedule!r} can be planned and simulated, but not be run yet; use one of {', '.join(SCHEDULES)}"
        )
    if schedule not in SCHEDULES:
        raise PlanError(f"no schedule is named {schedule!r}; use one of {', '.join(SCHEDULES)}")
    return planned_program(schedule, layout)
