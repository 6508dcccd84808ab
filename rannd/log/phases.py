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


@contextmanager
def long_phase(logger: str, text: str, *, shown: bool = True) -> Iterator[None]:
    """Say at level info what the block does, once it has taken long; nothing if it is short.

    Args:
        logger: name of the logger for the lines.
        text: what is done, such as "Tracing the model".
        shown: whether this process shows anything.
    """
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = EVERY_S
        while not ended.wait(pause):
            passed = time.monotonic() - begun
            get(logger).info("%s, for %.0f s so far", text, passed)
            pause = min(passed, MOST_S)

    # In a copy of the context, so that lines name the same model as those of this thread.
    thread = threading.Thread(target=copy_context().run, args=(tell,), name="rannd long phase", daemon=True)
    if shown:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if shown:
            thread.join()
