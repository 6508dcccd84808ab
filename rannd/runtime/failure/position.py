"""Where this process is in its work: what an error names, and what a watchdog compares."""

from __future__ import annotations

import threading
from typing import Any


class Where:
    """The place of the one thread that runs calls of models. Setting it is setting attributes, nothing more.

    The executor sets `stage`, `piece` and `action` (any object; its text is made when somebody asks); `Inside`
    (rannd.runtime.failure.detector) sets the rest. Other threads only read.
    """

    __slots__ = ("action", "call", "calls", "piece", "preparing", "stage", "step", "thread")

    def __init__(self) -> None:
        self.step: int | None = None
        """Number of the model's call, from 0; None before the first."""
        self.stage: int | None = None
        self.piece: int | None = None
        self.action: Any = None
        """An action of the Program (``F2``, ``RV2:0>1@1``), None between them."""
        self.call = ""
        """What of rannd is running (``forward``, ``backward``, ..), '' while the script itself does."""
        self.calls = 0
        """So many times rannd has been entered."""
        self.preparing = False
        """Tracing, profiling, planning: this takes as long as it takes."""
        self.thread = threading.main_thread().ident or 0
        """The thread that entered rannd last."""

    def snapshot(self) -> tuple[Any, ...]:
        """Equal as long as nothing has happened."""
        return (self.calls, self.call, self.step, self.stage, self.piece, id(self.action))

    def words(self) -> str:
        """``step 3, stage 1, piece 2, action F2 (forward)``; what is not known is left out."""
        parts = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("stage", self.stage), ("piece", self.piece))
            if value is not None
        ]
        if self.action is not None:
            parts.append(f"action {self.action}")
        if not self.call:
            return f"the script, after {parts[0]}" if parts else "the script, before the first step"
        return f"{', '.join(parts)} ({self.call})" if parts else self.call
