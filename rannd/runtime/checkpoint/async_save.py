"""A save that goes on while the script trains. One at a time: whatever touches checkpoints next waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rannd.errors import CheckpointError


class PendingSave:
    """What an asynchronous save gives back. Its thread keeps the process alive until the checkpoint is there."""

    def __init__(self, work: Callable[[], None], path: str) -> None:
        self._work = work
        self._path = path
        self._error: Exception | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name="rannd checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there. CheckpointError where it could not be written: then on all ranks."""
        self._thread.join()
        if self._error is not None and not self._told:
            self._told = True
            raise CheckpointError(f"the asynchronous save to {self._path} failed: {self._error}") from self._error

    result = wait
    """As of a ``concurrent.futures.Future``."""

    def _run(self) -> None:
        try:
            self._work()
        except Exception as exc:
            self._error = exc


_last: PendingSave | None = None


def start(work: Callable[[], None], path: str) -> PendingSave:
    """Save in a thread. The one before has ended."""
    global _last
    _last = PendingSave(work, path)
    return _last


def settle() -> None:
    """Wait for the save that goes on; its error is raised here where nobody has seen it."""
    global _last
    last, _last = _last, None
    if last is not None:
        last.wait()
