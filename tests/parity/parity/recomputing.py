"""Plans in which some blocks of a stage recompute, whatever the planner would choose: every other one of all blocks."""

from __future__ import annotations

from collections.abc import Callable

from parity.plan_keys import own_keys
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.recompute import DividedStage


def recompute_every_other() -> Callable[[], None]:
    """Have stages that recompute do so in every other block; returns what undoes it.

    Each block is a segment. The bytes are those of stages that recompute in all. In the cache plans have keys of their
    own.
    """
    segments = StageTables.segments

    def some(self: StageTables, start: int, end: int, replicas: int, *, used: int) -> DividedStage:
        found = segments(self, start, end, replicas, used=used)
        if not all(found.again):
            return found
        again = tuple(number % 2 == 0 for number in range(end - start))
        return DividedStage(tuple(range(1, end - start + 1)), again, found.kept, found.working, found.forward_us)

    StageTables.segments = some  # type: ignore[method-assign]
    undo_keys = own_keys("recompute", "every other block")

    def undo() -> None:
        StageTables.segments = segments  # type: ignore[method-assign]
        undo_keys()

    return undo
