"""Plans with several stages per slot, whatever the planner would choose: plans for as many slots, placed anew."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from parity.plan_keys import own_keys
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES
from rannd.runtime.planning.plan_provider import Planner, Target


def placed(planned: Deployment, slots: tuple[Slot, ...], schedule: str, passes: int, zero: int = 0) -> Deployment:
    """The stages of a plan on other slots, with `passes` stages each, under a schedule that allows it.

    If the schedule delays gradients of parameters, all stages that do not recompute are split, however little of their
    time was measured for that.
    """
    positions = len(planned.stages) // passes
    replicas = len(slots) // positions
    homes = tuple(tuple(range(at * replicas, (at + 1) * replicas)) for at in range(positions))
    virtual = VIRTUAL_SCHEDULES[schedule]
    stages = []
    for stage, each in zip(planned.stages, virtual.placed(homes, passes), strict=True):
        weight = 1.0 if virtual.delays_weights and not stage.recompute else 0.0
        estimate = msgspec.structs.replace(stage.estimate, weight_us=weight)
        stages.append(msgspec.structs.replace(stage, slots=each, estimate=estimate))
    return msgspec.structs.replace(planned, slots=slots, stages=tuple(stages), schedule=schedule, zero=zero)


def place_plans(schedule: str, passes: int, zero: int = 0) -> Callable[[], None]:
    """Have all plans made with `passes` stages on each slot, `partition_num` in all; returns what undoes it.

    They are made for as many slots as stages, so that `zero_stage` has to be 0. In the cache they have keys of their
    own.
    """
    make = Planner._make

    def made(self: Planner, target: Target | None = None) -> bytes:
        spread = tuple(Slot(0, device) for device in range(self._config.partition_num))
        planned = decode(make(self, Target(spread, sum(self._rows), self.usable_memory, self._made)))
        return encode(placed(planned, self._world.slots, schedule, passes, zero))

    Planner._make = made  # type: ignore[method-assign]
    undo_keys = own_keys("placed", f"{schedule} {passes} {zero}")

    def undo() -> None:
        Planner._make = make  # type: ignore[method-assign]
        undo_keys()

    return undo
