"""How often a job is started again after failures, and how long it waits before."""

from __future__ import annotations

from dataclasses import dataclass

BARREN = 3
"""Starts in a row that fail without a new step, after which the job ends: the next one would fail, too."""
LONGEST_S = 60.0
"""Maximum wait."""


@dataclass
class Restarts:
    """Counts the failures of a job.

    Args:
        most: Maximum number of restarts after failures.
    """

    most: int
    failures: int = 0
    barren: int = 0
    """Failures since the last one that had made a new step."""
    reached: int = -1
    """The latest step that any start has done; -1: none."""

    def note_step(self, step: int) -> None:
        """A start has done `step` steps. Only steps that no start had done before are progress."""
        if step > self.reached:
            self.reached, self.barren = step, 0

    def others(self) -> None:
        """The next start has other hosts: what failed before may not fail there."""
        self.barren = 0

    def fail(self) -> float | None:
        """Count a failure; return the seconds to wait before the next start, None if there must be none."""
        self.failures += 1
        self.barren += 1
        if self.failures > self.most or self.barren >= BARREN:
            return None
        return min(2.0 ** (self.barren - 1), LONGEST_S) if self.barren > 1 else 0.0

    def why(self) -> str:
        """Say why there is no further start."""
        if self.failures > self.most:
            return f"it has failed {self.failures} times (--max-restarts {self.most})"
        return f"{BARREN} starts in a row have failed without a new step"
