"""A save that goes on while the script trains. One at a time: whatever touches checkpoints next waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from rannd import log
from rannd.errors import CheckpointError, StepError
from rannd.runtime.failure import late_error


class PendingSave:
    """What an asynchronous save gives back. Its thread keeps the process alive until the checkpoint is there."""

    def __init__(self, work: Callable[[], None], path: str, *, tells: bool, asks: bool) -> None:
        """`tells`: log the error that all ranks have. `asks`: its owner asks for the `error`, and no call raises it."""
        self._work = work
        self._path = path
        self._tells = tells
        self._asks = asks
        self._error: Exception | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name="rannd checkpoint")

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there. CheckpointError where it could not be written: then on all ranks."""
        self.join()
        if self._error is not None and not self._told:
            self.raise_error()

    result = wait
    """As of a ``concurrent.futures.Future``."""

    @property
    def unseen(self) -> CheckpointError | None:
        """The error if nobody has seen it. That another rank has failed (StepError) every call says anyway."""
        return None if isinstance(self._error, StepError) or self._asks else self.untold

    @property
    def untold(self) -> CheckpointError | None:
        """The error if nobody has seen it, whatever it is: for the end of the script, after which no call comes."""
        error = self._error
        return None if error is None or self._told or self._asks else self._failure(error)

    @property
    def error(self) -> CheckpointError | None:
        """Its error, if it has ended with one."""
        return None if self._error is None else self._failure(self._error)

    def join(self) -> None:
        """Wait for the end, well or not."""
        if self._thread.ident is not None:
            self._thread.join()

    def raise_error(self) -> NoReturn:
        """Wait for the end, and raise its error, also where this rank's script has seen it."""
        self.join()
        assert self._error is not None
        self._told = True
        raise self._failure(self._error) from self._error

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"the asynchronous save to {self._path} failed: {error}")

    def _run(self) -> None:
        try:
            self._work()
        except Exception as exc:
            self._error = exc  # first of all: a log on a full disk may fail
            if self._tells or not isinstance(exc, CheckpointError):
                log.get("RaNNCModule").error("%s", self._failure(exc))


def start(work: Callable[[], None], path: str, *, tells: bool, asks: bool = False) -> PendingSave:
    """Save in a thread. The one before has ended, see `late_error.settle`. Arguments: as of `PendingSave`."""
    pending = PendingSave(work, path, tells=tells, asks=asks)
    late_error.follow(pending)
    try:
        pending._thread.start()
    except RuntimeError as exc:  # the savers of the other ranks wait for this rank's part
        log.get("RaNNCModule").warning("No thread can be started (%s): the checkpoint is written first", exc)
        pending._run()
    return pending
