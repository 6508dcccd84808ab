"""Lines of the log that say that a phase goes on, if it takes long and has no steps that `Progress` could count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

from rannd.log.loggers import get
from rannd.log.progress import EVERY_S

MOST_S = 60.0
"""Maximum seconds between two lines; they come ever less often, after 10 s, 20 s, 40 s, .."""


class LongPhases:
    """The phases that this process shows."""

    def __init__(self) -> None:
        self.ticked = False
        """Whether a thread of the process calls `tick` every few seconds. Each thread takes address space."""
        self._running: list[_Running] = []

    def tick(self) -> None:
        """Write the lines that are due."""
        for each in list(self._running):
            each.tell(time.monotonic())

    @contextmanager
    def running(self, logger: str, text: str) -> Iterator[None]:
        """Note a phase, with a thread of its own if nothing calls `tick`."""
        phase, ended = _Running(logger, text), threading.Event()
        thread = None
        self._running.append(phase)
        if not self.ticked:
            thread = threading.Thread(target=phase.watch, args=(ended,), name="rannd long phase", daemon=True)
            thread.start()
        try:
            yield
        finally:
            self._running.remove(phase)
            ended.set()
            if thread is not None:
                thread.join()


class _Running:
    def __init__(self, logger: str, text: str) -> None:
        self._logger, self._text = logger, text
        self._begun = time.monotonic()
        self._due = self._begun + EVERY_S
        self._context = copy_context()  # so that lines name the same model as those of this thread

    def tell(self, now: float) -> None:
        if now >= self._due:
            passed = now - self._begun
            self._due = now + min(passed, MOST_S)
            self._context.run(get(self._logger).info, "%s, for %.0f s so far", self._text, passed)

    def watch(self, ended: threading.Event) -> None:
        while not ended.wait(max(self._due - time.monotonic(), 0.0)):
            self.tell(time.monotonic())


PHASES = LongPhases()


@contextmanager
def long_phase(logger: str, text: str, *, shown: bool = True) -> Iterator[None]:
    """Say at level info what the block does, once it has taken long; nothing if it is short.

    Args:
        logger: name of the logger for the lines.
        text: what is done, such as "Tracing the model".
        shown: whether this process shows anything.
    """
    if not shown:
        yield
        return
    with PHASES.running(logger, text):
        yield
