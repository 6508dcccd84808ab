"""Plans in which some blocks of a stage recompute, whatever the planner would choose: every other one of all blocks."""

from __future__ import annotations

from collections.abc import Callable

from rannd.daemon.common.keys import Key, make_key
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.recompute import DividedStage
from rannd.runtime.planning.plan_provider import Planner


def recompute_every_other() -> Callable[[], None]:
    """Have stages that recompute do so in every other block; returns what undoes it.

    Each block is a segment. The bytes are those of stages that recompute in all. In the cache plans have keys of their
    own.
    """
    segments, key = StageTables.segments, Planner._key

    def some(self: StageTables, start: int, end: int, replicas: int, *, used: int) -> DividedStage:
        found = segments(self, start, end, replicas, used=used)
        if not all(found.again):
            return found
        again = tuple(number % 2 == 0 for number in range(end - start))
        return DividedStage(tuple(range(1, end - start + 1)), again, found.kept, found.working, found.forward_us)

    def own_key(self: Planner) -> Key:
        found = key(self)
        return make_key(found.kind, {**found.components, "recompute": "every other block"})

    StageTables.segments, Planner._key = some, own_key  # type: ignore[method-assign]

    def undo() -> None:
        StageTables.segments, Planner._key = segments, key  # type: ignore[method-assign]

    return undo
