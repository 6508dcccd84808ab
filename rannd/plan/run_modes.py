"""Schedules and ZeRO stages that the planner knows, and the one table of those that the runtime can run.

The planner plans, simulates and shows all of them, but chooses only what the runtime can run.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rannd.errors import PlanError


class RunMode(msgspec.Struct, frozen=True, order=True):
    """A schedule and a ZeRO stage.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    schedule: str
    zero: int = 0
    """What is sharded across the replicas of a stage: 1 optimizer state, 2 also gradients, 3 also parameters."""

    @property
    def name(self) -> str:
        """Such as 'zb_h1', 'ZeRO 2' or 'zb_h1 with ZeRO 1'; '' for 1F1B or fill-drain without ZeRO."""
        known = self.schedule if self.schedule == "zb_h1" else ""
        return " with ".join(filter(None, (known, f"ZeRO {self.zero}" if self.zero else "")))


_STAGES = (1, 2, 3)
RUNS: Mapping[RunMode, bool] = {
    RunMode("1f1b"): True,
    RunMode("fill_drain"): True,
    RunMode("zb_h1"): False,
    # Zero-bubble delays parameter gradients, which ZeRO 2 and 3 shard as soon as they are computed.
    RunMode("zb_h1", 1): False,
    **{RunMode(schedule, zero): False for schedule in ("1f1b", "fill_drain") for zero in _STAGES},
}
"""Every run mode, and whether the runtime can run it."""

SCHEDULES = tuple(way.schedule for way, runs in RUNS.items() if runs and not way.zero)
"""Names of the schedules that the runtime can run."""


def check_known(way: RunMode) -> None:
    """Raise PlanError for a run mode that the planner does not know."""
    if way not in RUNS:
        reason = "gradients are sharded as soon as they are computed" if way.zero in _STAGES else "stages are 0 to 3"
        raise PlanError(f"schedule {way.schedule!r} cannot be planned with ZeRO stage {way.zero}: {reason}")


def others(way: RunMode) -> list[RunMode]:
    """Return the run modes comparable to `way` that the runtime cannot run yet; least sharding first."""
    interleaved = way.schedule != "fill_drain"
    found = [each for each, runs in RUNS.items() if not runs and (each.schedule != "fill_drain") == interleaved]
    return sorted(found, key=lambda each: (each.zero, each.schedule))
