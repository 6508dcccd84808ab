"""How often a job is started again after failures, and how long it waits before."""

from __future__ import annotations

from dataclasses import dataclass

BARREN = 3
"""Starts in a row that fail without a new step, after which the job ends: the next one would fail, too."""
LONG_S = 600.0
"""Seconds of a start that has not failed at once, whatever its ranks tell."""


@dataclass
class Restarts:
    """Counts the failures of a job.

    Args:
        most: Maximum number of restarts after failures.
    """

    most: int
    failures: int = 0
    barren: int = 0
    """Starts in a row that have failed without a new step."""
    reached: int = -1
    """The latest step that any start has done; -1: none."""
    _progress: bool = False
    """Whether the present start has made a new step."""

    def begin(self, step: int) -> None:
        """The present start goes on after `step` steps."""
        self.reached = max(self.reached, step)

    def note_step(self, step: int) -> None:
        """The present start has done `step` steps. Only steps that no start had done before are progress."""
        if step > self.reached:
            self.reached, self._progress = step, True

    def others(self) -> None:
        """The next start has other hosts: what failed before may not fail there."""
        self.barren, self._progress = 0, False

    def fail(self, ran_s: float = 0.0) -> float | None:
        """Count a failure after `ran_s` seconds; return those to wait before the next start, None if there is none."""
        self.failures += 1
        self.barren = 0 if self._progress or ran_s >= LONG_S else self.barren + 1
        self._progress = False
        if self.failures > self.most or self.barren >= BARREN:
            return None
        return 2.0**self.barren if self.barren else 0.0

    def why(self) -> str:
        """Say why there is no further start."""
        if self.failures > self.most:
            return f"it has failed {self.failures} times (--max-restarts {self.most})"
        return f"{BARREN} starts in a row have failed without a new step"
