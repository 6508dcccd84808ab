"""How many microbatches a stage keeps under a schedule with several stages per slot.

It follows from the order of computations, which is that of any such pipeline with as many positions and microbatches.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from rannd.plan.schedule.program import ActionKind, Layout
from rannd.plan.schedule.schedules import planned_program

Flight = tuple[int, int]
"""Most microbatches of a stage between forward and backward, and between forward and its second half, if it is split.

These are the same where the backward is whole.
"""


def flights(schedule: str, layout: Layout, split: frozenset[int]) -> tuple[Flight, ...]:
    """Return the `Flight` of each stage of a layout whose slots have several stages.

    `split`: the stages whose backward is split into two halves.
    """
    firsts = [slots[0] for slots in layout.stages]
    numbers = {slot: number for number, slot in enumerate(dict.fromkeys(firsts))}
    return _flights(schedule, tuple(numbers[slot] for slot in firsts), layout.microbatches, split)


@lru_cache(maxsize=256)
def _flights(schedule: str, homes: tuple[int, ...], microbatches: int, split: frozenset[int]) -> tuple[Flight, ...]:
    one = Layout(max(homes) + 1, microbatches, tuple((home,) for home in homes), (), ())
    program = planned_program(schedule, one, split)
    found = []
    for stage, home in enumerate(homes):
        kinds = [action.kind for action in program.slots[home] if action.stage == stage]
        ends = ActionKind.WEIGHT if ActionKind.WEIGHT in kinds else ActionKind.BACKWARD
        first, most = (
            int(np.cumsum([(kind is ActionKind.FORWARD) - (kind is end) for kind in kinds]).max())
            for end in (ActionKind.BACKWARD, ends)
        )
        found.append((first, most))
    return tuple(found)
