"""Plans with several stages per slot, whatever the planner would choose: plans of as many slots as stages, placed anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from parity.case import Case
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES
from rannd.runtime.planning.plan_provider import Planner, Target


def placed(planned: Deployment, slots: tuple[Slot, ...], schedule: str, passes: int, zero: int = 0) -> Deployment:
    """The stages of a plan on other slots, with `passes` stages each, under a schedule that allows it."""
    positions = len(planned.stages) // passes
    replicas = len(slots) // positions
    homes = tuple(tuple(range(at * replicas, (at + 1) * replicas)) for at in range(positions))
    stages = zip(planned.stages, VIRTUAL_SCHEDULES[schedule].placed(homes, passes), strict=True)
    return msgspec.structs.replace(
        planned,
        slots=slots,
        stages=tuple(msgspec.structs.replace(stage, slots=each) for stage, each in stages),
        schedule=schedule,
        zero=zero,
    )


_plans: dict[str, bytes] = {}
"""Plans of cases, which are run twice with equal results."""


@contextlib.contextmanager
def placing(case: Case) -> Iterator[None]:
    """Have plans made with the stages of a case on each slot."""
    if case.passes == 1:
        yield
        return
    make = Planner._make

    def made(self: Planner, target: Target | None = None) -> bytes:
        if case.name not in _plans:
            spread = tuple(Slot(0, device) for device in range(case.stages))
            planned = decode(make(self, Target(spread, sum(self._rows), self.usable_memory, self._made)))
            new = placed(planned, self._world.slots, case.schedule, case.passes, max(case.zero, 0))
            _plans[case.name] = encode(new)
        return _plans[case.name]

    Planner._make = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planner._make = make  # type: ignore[method-assign]
