"""Which plans with several stages per slot there are, before they are cut into stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from rannd.plan.run_modes import RunMode
from rannd.plan.schedule.schedules import DEFAULT_SCHEDULE, DELAYING
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES, Slots
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import place

PASSES = (2, 4)
"""Numbers of stages per slot that are tried."""


class Shape(msgspec.Struct, frozen=True, order=True):
    """A plan with several stages per slot, but for its cuts."""

    schedule: str
    passes: int
    """Stages per slot."""
    positions: int
    """Slots of each pipeline."""
    replicas: int
    """Of each stage."""
    microbatches: int
    placement: str
    zero: int = 0
    offload_params: bool = False
    """Whether parameters are elsewhere while they are not needed: divided as with ZeRO 3, also without replicas."""

    @property
    def mode(self) -> RunMode:
        return RunMode(self.schedule, self.zero if self.replicas > 1 or self.offload_params else 0)

    @property
    def stages(self) -> int:
        return self.positions * self.passes

    @property
    def pieces(self) -> int:
        """Microbatches of a slot."""
        return self.positions * self.microbatches

    @property
    def delays(self) -> bool:
        """Whether gradients of parameters may be delayed."""
        return VIRTUAL_SCHEDULES[self.schedule].delays_weights

    @property
    def homes(self) -> tuple[int, ...]:
        """Position of each stage."""
        return tuple(home for (home,) in self._placed(tuple((position,) for position in range(self.positions))))

    @property
    def slots(self) -> Slots:
        """Slot of each replica of each stage."""
        return self._placed(place((self.replicas,) * self.positions, self.placement))

    @property
    def variant(self) -> Variant:
        """That of the tables with the costs of its stages: what counts is whether gradients are delayed."""
        costs_of = DELAYING[0] if self.delays else DEFAULT_SCHEDULE
        return Variant(costs_of, self.microbatches, self.placement, self.zero)

    @property
    def costs_key(self) -> Shape:
        """The same but for what makes no difference to cuts: the order of slots, if no parameters are gathered."""
        return self if self.mode.zero >= 2 else msgspec.structs.replace(self, placement="")

    def _placed(self, positions: Slots) -> Slots:
        return VIRTUAL_SCHEDULES[self.schedule].placed(positions, self.passes)


def has_passes(schedule: str, passes: int) -> bool:
    """Whether slots can have so many stages under a schedule."""
    return len(VIRTUAL_SCHEDULES[schedule].placed(((0,),), passes)) == passes


def shapes(
    schedules: Sequence[str],
    passes: Sequence[int],
    *,
    world: int,
    positions: Sequence[int],
    counts: Sequence[int],
    placements: Sequence[str],
    zeros: Sequence[int],
    offload_params: bool = False,
) -> Iterator[Shape]:
    """Yield all shapes: of each schedule with each of the given numbers, if these are possible together."""
    for schedule, each, count, zero in product(schedules, passes, positions, zeros):
        replicas = world // count
        runs = not zero or zero in VIRTUAL_SCHEDULES[schedule].zero
        if has_passes(schedule, each) and runs and (replicas > 1 or zero == min(zeros)):
            for microbatches, placement in product(counts, placements):
                yield Shape(schedule, each, count, replicas, microbatches, placement, zero, offload_params)
