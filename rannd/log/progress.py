"""Progress of long work: a bar on a terminal, otherwise a log line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from rannd.log.loggers import get

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

EVERY_S = 10.0


class Progress:
    """Progress of `total` steps, as a context manager.

    The bar is on standard error and disappears at the end. Where standard error is not a terminal, log lines take its
    place.

    Args:
        logger: name of the logger for the lines.
        text: the line, with ``{done}`` and ``{total}``.
        total: number of steps.
        shown: whether this process shows anything.
        tell: called after each step with the fraction of the steps that are done.
    """

    def __init__(
        self,
        logger: str,
        text: str,
        total: int,
        *,
        shown: bool = True,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        self._logger, self._text, self._total = get(logger), text, total
        self._tell = tell
        self._shown = shown and total > 1
        self._done = 0
        self._told = 0.0
        self._bar: Bar | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        self._told = time.monotonic()
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = self._stack.enter_context(Bar(console=Console(stderr=True), transient=True))
            self._bar.add_task(self._line(), total=self._total)
        return self

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        if self._tell is not None:
            self._tell(self._done / self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=self._line())
        elif self._shown and time.monotonic() - self._told >= EVERY_S:
            self._told = time.monotonic()
            self._logger.info("%s", self._line())

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _line(self) -> str:
        return self._text.format(done=self._done, total=self._total)
