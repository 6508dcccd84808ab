"""Description of a rank's failure, for its user and for all other ranks."""

from __future__ import annotations

import msgspec
import torch.distributed as dist

from rannd.errors import RanndError, text_of
from rannd.runtime.failure.position import Where

LONGEST = 2000
"""Maximum number of characters of an error's text that are sent."""

_BROKEN = ("gloo", "NCCL", "TCPStore", "Connection closed", "Connection reset", "Broken pipe", "Socket Timeout")
"""Substrings of torch.distributed's errors when a connection breaks; these are plain RuntimeErrors."""


class Failure(msgspec.Struct, frozen=True):
    """Failure of a rank, which ends the job."""

    rank: int
    host: str
    pid: int
    """0 if unknown."""
    kind: str
    """``raised``; ``memory`` (out of memory); ``gone`` (process ended without a message); ``hang``."""
    place: str
    """`Where.words`."""
    error: str
    """Type and text of the error, or a description if there is none."""
    stage: int | None = None
    runs: tuple[int, ...] = ()
    """Stages of a rank that is gone."""
    piece: int | None = None
    action: str = ""
    certain: bool = True
    """False if all ranks may be raising the same error, after which they are still in sync."""
    deployment: str = ""
    """Digest of the cached deployment that ran out of memory."""
    limit: int = 0
    """Bytes per device that the next plan may use after running out of memory, 0 if unknown."""

    def words(self) -> str:
        """One-line message for users."""
        who = f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank} ({self.host})"
        if self.kind == "gone":
            stages = f"stage{'s' if len(self.runs) > 1 else ''} {', '.join(map(str, self.runs))}"
            runs = f", which runs {stages}," if self.runs else ""
            return f"{who}{runs} has ended without an error message; {self.error}"
        if self.kind == "hang":
            return f"the job hangs: {self.error}"
        what = "ran out of memory" if self.kind == "memory" else "failed"
        return f"{who} {what} in {self.place}: {self.error}"


def describe(exc: BaseException) -> str:
    """Type and text of an exception."""
    text = text_of(exc)
    text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


def failure_of(exc: BaseException, where: Where, *, rank: int, host: str, pid: int) -> Failure:
    """Build the Failure of an exception on this rank; it is not certain if raised before any action ran."""
    return Failure(
        rank=rank,
        host=host,
        pid=pid,
        kind="raised",
        place=where.words(),
        error=describe(exc),
        stage=where.stage,
        piece=where.piece,
        action="" if where.action is None else str(where.action),
        certain=not (isinstance(exc, RanndError) and where.call and where.action is None),
    )


def is_broken(exc: BaseException) -> bool:
    """Whether an exception was caused by a broken connection between ranks, not by the model."""
    if isinstance(exc, dist.DistError):
        return True
    return isinstance(exc, RuntimeError) and any(word in text_of(exc) for word in _BROKEN)
