"""Run modes: schedules with the ZeRO stages that they can be combined with, and what may be offloaded."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rannd.errors import PlanError
from rannd.plan.plan_options import PlanOptions
from rannd.plan.schedule.schedules import ALL_SCHEDULES, DELAYING, SCHEDULES
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES

__all__ = [
    "LEAST_GAIN",
    "OFFLOADS",
    "PARAMS_ZERO",
    "RUN_MODES",
    "SCHEDULES",
    "VIRTUAL_GAIN",
    "Offload",
    "RunMode",
    "Time",
    "check_known",
    "preference_us",
    "runnable_zero",
    "virtual_gain",
]

Time = TypeVar("Time", float, npt.NDArray[np.float64])

LEAST_GAIN = 0.05
"""Part of a step that a plan with ZeRO, or under a schedule that delays weight gradients, has to save to be preferred
to one without: no cost counts gathers that hide less than assumed, and halves of a backward that take 1.01 to 1.17
times as much as all of it (docs/benchmarks.md); and with ZeRO 2 and 3 a script sees pieces of its tensors."""

VIRTUAL_GAIN = 0.03
"""Part of a step that a plan with several stages per slot has to save to be preferred to one with one: it sends more
and smaller messages, which costs count as if links had nothing else to do."""


class RunMode(msgspec.Struct, frozen=True, order=True):
    """A schedule and a ZeRO stage.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    schedule: str
    zero: int = 0
    """What is sharded across the replicas of a stage: 1 optimizer state, 2 also gradients, 3 also parameters."""


RUN_MODES = tuple(RunMode(each.name, zero) for each in ALL_SCHEDULES.values() for zero in (0, *each.zero))
"""Every run mode with one stage per slot."""


class Offload(msgspec.Struct, frozen=True, order=True):
    """What is elsewhere while it is not needed: in the host's memory, or in files."""

    optimizer: bool = False
    """The optimizer's state, between steps."""
    params: bool = False
    """Parameters, between the segments that read them: divided as with ZeRO 3, also if a stage has one replica."""
    activations: bool = False
    """What segments that recompute start from, between their forward and backward."""

    @classmethod
    def items(cls) -> list[str]:
        """The configuration items, in the order of what they are about."""
        return [f"offload_{name}" for name in cls.__struct_fields__]

    @classmethod
    def asked(cls, options: PlanOptions) -> Offload:
        """What options ask for."""
        return cls(*(getattr(options, item) == "true" for item in cls.items()))

    @property
    def settings(self) -> list[str]:
        """The configuration items that ask for it."""
        return [item for item, does in zip(self.items(), msgspec.structs.astuple(self), strict=True) if does]

    def allowed_by(self, options: PlanOptions) -> bool:
        """Whether options allow plans that offload this, and no more or less."""
        asked = zip(self.items(), msgspec.structs.astuple(self), strict=True)
        return all(getattr(options, item) in ("auto", str(does).lower()) for item, does in asked)

    def applied(self, options: PlanOptions) -> PlanOptions:
        """The options, asking for this and no more; all blocks recompute if `offload_activations` is set."""
        does = (str(each).lower() for each in msgspec.structs.astuple(self))
        asked: dict[str, object] = dict(zip(self.items(), does, strict=True))
        if options.offload_activations == "true":
            asked |= {"checkpointing": True, "checkpointing_no_last": False}
        return msgspec.structs.replace(options, **asked)


PARAMS_ZERO = 3
"""The ZeRO stage with which parameters can be offloaded."""

OFFLOADS = tuple(
    Offload(optimizer, params, activations)
    for params in (False, True)
    for activations in (False, True)
    for optimizer in (False, True)
)
"""All that may be offloaded, in the order in which it is tried until a plan fits."""


def preference_us(zero: int, step_us: Time) -> Time:
    """The time by which plans with different ZeRO stages are compared; the smallest is preferred."""
    return step_us / (1 - LEAST_GAIN) if zero else step_us


def virtual_gain(way: RunMode, than: RunMode) -> float:
    """Part of a step that a plan with several stages per slot has to save to be preferred to another one.

    If it also has ZeRO, or delays weight gradients, and the other one does neither of these, see `LEAST_GAIN`.
    """
    delays = VIRTUAL_SCHEDULES[way.schedule].delays_weights and than.schedule not in DELAYING
    return LEAST_GAIN if delays or (way.zero and not than.zero) else VIRTUAL_GAIN


def runnable_zero(schedule: str) -> list[int]:
    """The ZeRO stages that a schedule can be combined with, 0 first."""
    known = VIRTUAL_SCHEDULES.get(schedule) or ALL_SCHEDULES[schedule]
    return [0, *known.zero]


def check_known(way: RunMode) -> None:
    """Raise PlanError for a run mode that there is not."""
    if way in RUN_MODES:
        return
    schedule = ALL_SCHEDULES.get(way.schedule)
    if schedule is None:
        raise PlanError(f"no schedule is named {way.schedule!r}; use one of {', '.join(ALL_SCHEDULES)}")
    if way.zero not in range(4):
        reason = "stages are 0 to 3"
    elif schedule.delays_weights and way.zero >= 2:
        reason = "gradients are sharded as soon as they are computed"
    else:
        reason = f"it can be planned with {', '.join(map(str, (0, *schedule.zero)))}"
    raise PlanError(f"schedule {way.schedule!r} cannot be planned with ZeRO stage {way.zero}: {reason}")
