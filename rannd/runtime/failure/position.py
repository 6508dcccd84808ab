"""Current position of a thread (step, stage, microbatch, action), for error messages and the watchdog."""

from __future__ import annotations

import threading
from typing import Any

SAVING = "asynchronous save"
"""`Where.call` of the thread that writes a checkpoint while the script goes on."""


class Where:
    """Position of the thread that runs calls of models, or of one beside it; updated by plain attribute assignment.

    The executor sets `stage`, `piece` (a microbatch of one rank's mini-batch) and `action` (any object, converted to
    text only on demand); rannd.runtime.failure.detector sets the rest. Other threads only read.
    """

    __slots__ = (
        "action",
        "call",
        "calls",
        "depth",
        "piece",
        "preparing",
        "ranks",
        "stage",
        "step",
        "thread",
        "turns",
        "user_line",
    )

    def __init__(self) -> None:
        self.step: int | None = None
        """Index of the model's call, None before the first."""
        self.stage: int | None = None
        self.piece: int | None = None
        self.ranks: tuple[int, ...] = ()
        """Rank of each slot: piece p is of the mini-batch of slot ``p % len(ranks)``. Empty as long as not known."""
        self.action: Any = None
        """Current action of the Program (``F2``, ``RV2:0>1@1``), None between actions."""
        self.call = ""
        """Running entry point of rannd (``forward``, ``backward``, ..), '' while the script itself runs."""
        self.calls = 0
        """Number of entries into rannd so far."""
        self.turns = 0
        """Number of blocks of rannd entered so far, inner ones included: progress inside a call."""
        self.depth = 0
        """Number of blocks of rannd that it is inside of."""
        self.preparing = False
        """Whether it is tracing, profiling, planning, or writing beside the script, which has no time limit."""
        self.thread = threading.main_thread().ident or 0
        """Thread that entered rannd last."""
        self.user_line = ""
        """Line of the user's code that has entered rannd, ``train.py:33``, for stacks too deep to see it."""

    def snapshot(self) -> tuple[Any, ...]:
        """Snapshot that changes with every update of the position."""
        return (self.turns, self.call, self.step, self.stage, self.piece, id(self.action))

    def words(self) -> str:
        """Position as text: ``step 3, stage 1, microbatch 2 of rank 0's mini-batch, action F4 (forward)``.

        Unknown parts are left out.
        """
        parts = [f"{name} {value}" for name, value in (("step", self.step), ("stage", self.stage)) if value is not None]
        if self.piece is not None and self.ranks:
            number, slot = divmod(self.piece, len(self.ranks))
            parts.append(f"microbatch {number} of rank {self.ranks[slot]}'s mini-batch")
        elif self.piece is not None:
            parts.append(f"microbatch {self.piece}")
        if self.action is not None:
            parts.append(f"action {self.action}")
        if not self.call:
            return f"the script, after {parts[0]}" if parts else "the script, before the first step"
        return f"{', '.join(parts)} ({self.call})" if parts else self.call
