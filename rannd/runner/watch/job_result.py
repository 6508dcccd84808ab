"""How the ranks of a job ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RankEnd:
    """How one rank ended."""

    rank: int
    host: str
    pid: int
    status: int
    """Exit code, or minus the signal that killed it."""
    time: float
    """Seconds since the epoch, by the clock of the rank's host."""
    tail: str
    """The end of its standard error."""
    ordered: bool
    """Whether it ended by the signal that rannc-run had sent it."""
    lost: bool = False
    """Whether its host does not answer any more, so that the fate of the rank is unknown."""

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, and not because it was told to end."""
        return self.status != 0 and not self.ordered


@dataclass
class JobResult:
    """What happened to a job."""

    ends: list[RankEnd] = field(default_factory=list)
    """One per rank that reported its end, by time."""
    signal: int = 0
    """The signal that ended the job from outside (SIGPIPE: standard output was closed), 0 for none."""
    launcher_status: int = 0
    """Exit code of the MPI launcher, or minus the signal."""
    launcher_output: str = ""
    """The end of the launcher's own output."""
    missing: int = 0
    """Number of ranks that never reported that they run."""
    late: bool = False
    """Whether the job was ended because not all ranks had started in time."""

    @property
    def failures(self) -> list[RankEnd]:
        """The ranks that failed by themselves, first one first."""
        return [end for end in self.ends if end.failed]
