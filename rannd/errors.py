"""The exception classes of rannd and the exit code of each.

=====================  =========  =====================================================
error                  exit code  when
=====================  =========  =====================================================
RanndError             1          base class; never raised itself
├─ ConfigError         2          a configuration file, item or variable is wrong
├─ UsageError          2          a command or API call is used in a wrong way
├─ TraceError          3          the user's model cannot be turned into a graph
├─ CutError            3          a graph cannot be cut where a plan wants it
├─ ProfileError        4          a block cannot be measured
├─ PlanError           4          no plan satisfies what was asked
│  └─ DoesNotFitError  4          no plan fits the devices' memory
├─ DeploymentError     5          a stored or loaded deployment does not fit this job
├─ StepError           5          ranks disagree, or a step is used in a wrong order
│  ├─ RankFailedError  5          another rank has failed
│  ├─ NotANumberError  5          a value of the model is NaN
│  └─ AuditError       5          a step differs from its replay, or a recomputed value from the first one
├─ DaemonError         6          the daemon cannot be started or answers with an error
│  └─ ProtocolError    6          a message breaks the protocol
├─ LaunchError         7          ranks cannot be started
└─ CheckpointError     8          a checkpoint cannot be written or read, or is another model's
=====================  =========  =====================================================

The message of an error says what was wrong, with the value, and what to do. A command that ends with an error exits
with its ``exit_code``, and so does a process whose last asynchronous save has failed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType


class RanndError(Exception):
    """Base class of all errors that rannd raises on purpose."""

    exit_code = 1


class ConfigError(RanndError):
    """A configuration file, item or environment variable is wrong."""

    exit_code = 2


class UsageError(RanndError):
    """A command or an API function is used in a way that cannot work."""

    exit_code = 2


class TraceError(RanndError):
    """The user's model cannot be traced into a graph."""

    exit_code = 3


class CutError(RanndError):
    """A graph cannot be partitioned as a plan requires."""

    exit_code = 3


class ProfileError(RanndError):
    """A block of the model cannot be measured."""

    exit_code = 4


class PlanError(RanndError):
    """No plan satisfies the configuration."""

    exit_code = 4


class DoesNotFitError(PlanError):
    """No plan fits the memory of the devices. `needed`: bytes of a device that would suffice, 0 if not known."""

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class DeploymentError(RanndError):
    """A stored or loaded deployment does not belong to this job."""

    exit_code = 5


class StepError(RanndError):
    """Ranks disagree about a step, or the calls of a step come in an impossible order."""

    exit_code = 5


class RankFailedError(StepError):
    """Another rank has failed, so this rank cannot continue. `rank` is the number of the failed one."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class NotANumberError(StepError):
    """A value of the model is NaN."""


class AuditError(StepError):
    """A step differs from its replay (`verify_step`), or a recomputed value from the first one (`verify_recomp`)."""


class CheckpointError(RanndError):
    """A checkpoint cannot be written or read, is damaged, or belongs to another model."""

    exit_code = 8


class DaemonError(RanndError):
    """The daemon cannot be started, or it answered with an error."""

    exit_code = 6


class ProtocolError(DaemonError):
    """A message to or from the daemon breaks the protocol."""


class LaunchError(RanndError):
    """The ranks of a job cannot be started."""

    exit_code = 7


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, or a note where the exception's own ``__str__`` fails."""
    try:
        return str(exc)
    except Exception as wrong:
        return f"(no text: its __str__ raises {type(wrong).__name__})"


def advice_for_caller(advice: Mapping[tuple[str, str], str], otherwise: str) -> str:
    """Of the functions that are running, the advice of the outermost that has one; else `otherwise`.

    `advice`: by how the name of a function's module begins, and the name of the function.
    """
    frame: FrameType | None = sys._getframe(1)
    found = otherwise
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        for (start, function), text in advice.items():
            if name == function and module.startswith(start):
                found = text
        frame = frame.f_back
    return found
