"""Memory and work of the devices of a deployment: a slot with several stages holds all, and computes one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rannd.plan.deployment import Deployment, StageEstimate
from rannd.plan.schedule.in_flight import Flight, Flights, flights
from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES

MOST_POSITIONS = 64
"""Slots of a pipeline up to which it is looked up what its stages keep at a time."""


def stages_by_slots(deployment: Deployment) -> dict[tuple[int, ...], list[int]]:
    """Return the numbers of the stages that the same slots run, ascending, by these slots."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(deployment.stages):
        found.setdefault(stage.slots, []).append(number)
    return found


def device_bytes(deployment: Deployment) -> dict[tuple[int, ...], int]:
    """Return the planned bytes of each device, by the slots that have the same stages: those of the replay, if any.

    Of deployments that cannot be run, and of very long pipelines, each stage counts with the most that it needs.
    """
    estimates = [stage.estimate for stage in deployment.stages]
    groups = stages_by_slots(deployment)
    if all(each.most_bytes for each in estimates):
        return {slots: estimates[numbers[0]].most_bytes for slots, numbers in groups.items()}
    slots = tuple(stage.slots for stage in deployment.stages)
    virtual = VIRTUAL_SCHEDULES.get(deployment.schedule)
    if virtual is None or len(groups) > MOST_POSITIONS or virtual.problem(slots):
        return {slots: sum(estimates[number].total_bytes for number in numbers) for slots, numbers in groups.items()}
    split = frozenset(number for number, each in enumerate(estimates) if each.weight_us > 0)
    flown = flights(deployment.schedule, Layout(len(deployment.slots), deployment.microbatches, slots, (), ()), split)
    return {slots: together(estimates, flown, numbers) for slots, numbers in groups.items()}


def slot_bytes(deployment: Deployment, slot: int) -> int:
    """Return the planned bytes of one device."""
    return next(size for slots, size in device_bytes(deployment).items() if slot in slots)


def fullest_bytes(deployment: Deployment) -> int:
    """Return the planned bytes of the fullest device."""
    return max(device_bytes(deployment).values())


def busiest_us(deployment: Deployment) -> float:
    """Return the estimated time that the device computes in a step that computes longest."""
    estimates = [stage.estimate for stage in deployment.stages]
    groups = stages_by_slots(deployment).values()
    return max(sum(estimates[each].forward_us + estimates[each].backward_us for each in numbers) for numbers in groups)


def together(estimates: Sequence[StageEstimate], flown: Flights, numbers: Sequence[int]) -> int:
    """Return the bytes of a device that has several stages, those of the given numbers.

    Each counts with what it keeps at the moment that is the worst for all together, and with its messages as if it
    were alone; temporary memory counts once.
    """
    own = [(estimates[number], flown.most[number], flown.moments[number]) for number in numbers]
    always = sum(each.total_bytes - each.working_bytes - each.activation_bytes for each, _, _ in own)
    kept = max(sum(_kept(each, most, moments[place]) for each, most, moments in own) for place in range(len(own[0][2])))
    return always + kept + max(each.working_bytes for each, _, _ in own)


def _kept(estimate: StageEstimate, most: Flight, moment: Flight) -> int:
    """Activations of a stage at a moment."""
    (first, all_), (now, waiting) = most, moment
    later = estimate.weight_bytes
    alone = (estimate.activation_bytes - later * (all_ - first) * (later > 0)) / first
    return math.ceil(alone * now + later * (waiting - now) * (later > 0))
