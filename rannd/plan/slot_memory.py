"""Memory of the devices of a deployment: a slot with several stages holds all of them, and computes one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from rannd.plan.deployment import Deployment, StageEstimate


def stages_by_slots(deployment: Deployment) -> dict[tuple[int, ...], list[int]]:
    """Return the numbers of the stages that the same slots run, ascending, by these slots."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(deployment.stages):
        found.setdefault(stage.slots, []).append(number)
    return found


def together(estimates: Sequence[StageEstimate]) -> int:
    """Return the bytes of a device that has all of these stages."""
    working = [each.working_bytes for each in estimates]
    return sum(each.total_bytes for each in estimates) - sum(working) + max(working)


def device_bytes(deployment: Deployment) -> dict[tuple[int, ...], int]:
    """Return the planned bytes of each device, by the slots that have the same stages."""
    return {
        slots: together([deployment.stages[number].estimate for number in numbers])
        for slots, numbers in stages_by_slots(deployment).items()
    }


def fullest_bytes(deployment: Deployment) -> int:
    """Return the planned bytes of the fullest device."""
    return max(device_bytes(deployment).values())
