"""What is told of a rank that fails: to its user, and to all other ranks."""

from __future__ import annotations

import msgspec
import torch.distributed as dist

from rannd.errors import RanndError, text_of
from rannd.runtime.failure.position import Where

LONGEST = 2000
"""Letters of an error's text that travel."""

_BROKEN = ("gloo", "NCCL", "TCPStore", "Connection closed", "Connection reset", "Broken pipe", "Socket Timeout")
"""What the errors of torch.distributed hold when a connection breaks; they are plain RuntimeErrors."""


class Failure(msgspec.Struct, frozen=True):
    """The end of a rank's part in the job."""

    rank: int
    host: str
    pid: int
    """0: not known."""
    kind: str
    """``raised``; ``memory`` (ran out of it); ``gone`` (ended without a word); ``hang``."""
    place: str
    """`Where.words`."""
    error: str
    """Type and text of the error, or what is known instead."""
    stage: int | None = None
    piece: int | None = None
    action: str = ""
    certain: bool = True
    """False: all ranks may be raising the same error, after which they are still in step."""
    deployment: str = ""
    """Digest of the cached deployment that ran out of memory."""
    limit: int = 0
    """Bytes that the next plan may use of a device after that, 0: not known."""

    def words(self) -> str:
        """One line for everybody."""
        who = f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank} ({self.host})"
        if self.kind == "gone":
            runs = "" if self.stage is None else f", which runs stage {self.stage},"
            return f"{who}{runs} has ended without a word; {self.error}"
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
    """What to tell of an exception on this rank. Errors before any action ran may be on all ranks alike."""
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
    """Whether an exception says that a connection between ranks broke, and not what the model did."""
    if isinstance(exc, dist.DistError):
        return True
    return isinstance(exc, RuntimeError) and any(word in text_of(exc) for word in _BROKEN)
