"""How many microbatches the stages of a slot keep under a schedule with several stages per slot.

It follows from the order of computations, which is that of any such pipeline with as many positions and microbatches.
The stages of a slot keep most at different times, so that the maxima of each would say too much of all together.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from rannd.plan.schedule.program import ActionKind, Layout
from rannd.plan.schedule.schedules import planned_program

Flight = tuple[int, int]
"""Microbatches of a stage between forward and backward, and between forward and its second half, if it is split.

These are the same where the backward is whole.
"""


STEADY = 4
"""Microbatches per rank from which on more make no difference: the order repeats itself."""


class Flights(msgspec.Struct, frozen=True):
    """What the stages of a layout with several stages per slot keep."""

    most: tuple[Flight, ...]
    """Maxima of each stage."""
    moments: tuple[tuple[Flight, ...], ...]
    """For each stage, what it keeps at the moments at which its slot may need most memory: those of one slot are the
    same for all of its stages, and no other moment has as many or more of all."""


def flights(schedule: str, layout: Layout, split: frozenset[int]) -> Flights:
    """Return what each stage of a layout whose slots have several stages keeps.

    `split`: the stages whose backward is split into two halves.
    """
    firsts = [slots[0] for slots in layout.stages]
    numbers = {slot: number for number, slot in enumerate(dict.fromkeys(firsts))}
    homes = tuple(numbers[slot] for slot in firsts)
    return _flights(schedule, homes, min(layout.microbatches, STEADY), split)


@lru_cache(maxsize=256)
def _flights(schedule: str, homes: tuple[int, ...], microbatches: int, split: frozenset[int]) -> Flights:
    one = Layout(max(homes) + 1, microbatches, tuple((home,) for home in homes), (), ())
    program = planned_program(schedule, one, split)
    most: dict[int, Flight] = {}
    moments: dict[int, tuple[Flight, ...]] = {}
    for home, actions in enumerate(program.slots):
        own = one.stages_of(home)
        computed = [each for each in actions if each.kind is not ActionKind.REDUCE]
        changes = np.zeros((len(computed), len(own), 2), dtype=np.int64)
        for place, action in enumerate(computed):
            stage = own.index(one.stage_at(home, action))
            if action.kind is ActionKind.FORWARD:
                changes[place, stage] = 1
            elif action.kind is ActionKind.BACKWARD:
                changes[place, stage] = -1, 0 if own[stage] in split else -1
            else:
                changes[place, stage, 1] = -1
        counts = np.cumsum(changes, axis=0)
        kept = _largest(counts.reshape(len(computed), -1)).reshape(-1, len(own), 2)
        for stage, number in enumerate(own):
            first, all_ = counts[:, stage].max(axis=0).tolist()
            most[number] = first, all_
            moments[number] = tuple((int(a), int(b)) for a, b in kept[:, stage])
    stages = range(len(homes))
    return Flights(tuple(most[stage] for stage in stages), tuple(moments[stage] for stage in stages))


def _largest(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows that no other row equals or exceeds in all columns."""
    found: list[npt.NDArray[np.int64]] = []
    for row in sorted(np.unique(rows, axis=0), key=lambda each: -int(each.sum())):
        if not any((row <= other).all() for other in found):
            found.append(row)
    return np.array(found)
