"""Which plans with several stages per slot the configuration asks for, or allows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rannd.errors import PlanError
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES
from rannd.plan.virtual.virtual_plans import VirtualPlans
from rannd.plan.virtual.virtual_shapes import PASSES, Shape, has_passes, shapes


class VirtualAsked(msgspec.Struct, frozen=True):
    """What the configuration says of several stages per slot."""

    schedules: tuple[str, ...]
    passes: tuple[int, ...]
    forced: bool
    """Whether there has to be more than one."""
    why_not: str = ""
    """Why there is one, if that is known before any plan is made; schedules are empty then."""


def asked_for(options: PlanOptions, *, interleaved: bool) -> VirtualAsked:
    """Return what is asked for.

    Args:
        options: The configuration.
        interleaved: Whether backward runs inside the call.

    Raises:
        PlanError: Several stages per slot are asked for, and something excludes them.
    """
    names = tuple(VIRTUAL_SCHEDULES)
    virtual, given = options.virtual_stages, options.schedule
    forced = given in names or virtual not in (AUTO, "1")
    passes = PASSES if virtual == AUTO else (int(virtual),)
    if given in names and virtual == "1":
        raise PlanError(f"schedule={given} has several stages per slot, but virtual_stages=1; set virtual_stages=auto")
    if not forced:
        if virtual == "1":
            return VirtualAsked((), (), False, "set by virtual_stages=1")
        if not interleaved:
            return VirtualAsked((), (), False, "backward runs after the call")
        if given != AUTO:
            return VirtualAsked((), (), False, f"schedule={given} has one stage per slot")
        if options.partition_num:
            return VirtualAsked((), (), False, f"set by partition_num={options.partition_num}")
        return VirtualAsked(names, passes, False)
    asked = f"schedule={given}" if given in names else f"virtual_stages={virtual}"
    if not interleaved:
        raise PlanError(
            f"{asked} needs a backward inside the call: the model has to return its loss alone, with "
            "interleave_loss=true; or set virtual_stages=auto and schedule=auto"
        )
    if given not in (AUTO, *names):
        raise PlanError(
            f"schedule={given} has one stage per slot, but virtual_stages={virtual}; set schedule=auto or one of "
            f"{', '.join(names)}"
        )
    wanted = (given,) if given in names else names
    schedules = tuple(each for each in wanted if any(has_passes(each, count) for count in passes))
    if not schedules:
        raise PlanError(
            f"schedule={given} cannot have virtual_stages={virtual} stages per slot; set virtual_stages=auto"
        )
    return VirtualAsked(schedules, passes, True)


def shapes_of(
    plans: VirtualPlans, asked: VirtualAsked, *, counts: Sequence[int], zeros: Sequence[int], allowed: Sequence[int]
) -> list[Shape]:
    """Return the shapes to try.

    Args:
        plans: What they are made of.
        asked: What is asked for.
        counts: Numbers of microbatches.
        zeros: ZeRO stages.
        allowed: Numbers of replicas that a stage may have.
    """
    world, parts, options = plans.world, int(plans.may_begin.sum()) - 1, plans.options
    divisors = [count for count in range(2, world + 1) if world % count == 0 and world // count in allowed]
    every = shapes(
        asked.schedules,
        asked.passes,
        world=world,
        positions=divisors,
        counts=counts,
        placements=plans.machine.placements,
        zeros=zeros,
        offload_params=options.offload_params == "true",
    )
    return [
        each
        for each in every
        if each.stages <= parts and (not options.partition_num or each.stages == options.partition_num)
    ]
