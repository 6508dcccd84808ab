"""What measured steps of earlier jobs say of a graph's costs, in the cache beside the profile.

Kept is what stages took, not what follows from it: when parts are measured anew, the correction is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rannd.profile.points import LONGEST_US, Measured
from rannd.runtime.costs.correction import Correction, StageWork, fitted
from rannd.runtime.costs.known_costs import MeasuredParts

LEARNED_FORMAT = 3
MOST_STAGES = 32
"""Maximum number of measured stages that are kept: the latest."""


class StageTook(msgspec.Struct, frozen=True, array_like=True):
    """What a stage took for one microbatch in steps of a job. Microseconds."""

    ops: tuple[int, ...]
    """Indices of its operators in the task graph."""
    rows: int
    most: int
    """Rows of the largest microbatch that its plan might have had."""
    forward_us: float
    backward_us: float
    """Both halves, without accumulating gradients."""


class LearnedCosts(msgspec.Struct, frozen=True):
    """What is known of the stages of a graph on one kind of device."""

    format: int = LEARNED_FORMAT
    stages: tuple[StageTook, ...] = ()
    """The latest first."""
    doubts: int = 0
    """How often stages have taken something else than their parts, so that these were measured anew."""

    def and_those(self, stages: Sequence[StageTook], *, doubts: int) -> LearnedCosts:
        """Return what is known after more steps; of a stage that was measured before, only the new times.

        So a plan that runs again and again does not count more than others, and does not displace them.
        """
        of_stage: dict[tuple[tuple[int, ...], int, int], StageTook] = {}
        for each in (*stages, *self.stages):
            of_stage.setdefault((each.ops, each.rows, each.most), each)
        return LearnedCosts(LEARNED_FORMAT, tuple(of_stage.values())[:MOST_STAGES], self.doubts + doubts)

    def works(self, parts: MeasuredParts, profile: Mapping[str, Measured]) -> list[StageWork]:
        """Return the stages with the costs of their parts; not those with parts that were not measured."""
        found = []
        for each in self.stages:
            try:
                (work,) = parts.work([each.ops], profile, each.rows, each.most)
            except KeyError:
                continue
            found.append(StageWork(work.forward_us, work.backward_us, each.forward_us, each.backward_us))
        return found

    def correction(self, parts: MeasuredParts, profile: Mapping[str, Measured]) -> Correction:
        """Return what follows for the costs of the graph."""
        return fitted(self.works(parts, profile))

    def is_plausible(self, ops: int) -> bool:
        """Whether this can be of a graph with so many operators: validates what was read from the cache."""
        return (
            self.format == LEARNED_FORMAT
            and self.doubts >= 0
            and len(self.stages) <= MOST_STAGES
            and all(
                1 <= each.rows <= each.most
                and 0 < each.forward_us <= LONGEST_US
                and 0 <= each.backward_us <= LONGEST_US
                and all(0 <= op < ops for op in each.ops)
                and len(set(each.ops)) == len(each.ops)
                for each in self.stages
            )
        )
