"""Of which model a line of the log is: its name in front of the message, in processes that have wrapped several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakSet


class LogSubject:
    """A wrapped model, as what lines of the log are about.

    Args:
        name: the name of its class; a number follows if other models of that class are wrapped.
    """

    def __init__(self, name: str) -> None:
        taken, number = {subject.name for subject in _subjects}, 1
        self.name: str = name
        while self.name in taken:
            number += 1
            self.name = f"{name} {number}"
        _subjects.add(self)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Lines that this thread writes within are about this model."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def end(self) -> None:
        """Forget the model, which is wrapped no longer."""
        _subjects.discard(self)


def prefix() -> str:
    """What a message begins with: the name of the model that it is about, if there are several; else nothing."""
    subject = _current.get()
    return f"{subject.name}: " if subject is not None and len(_subjects) > 1 else ""


_subjects: WeakSet[LogSubject] = WeakSet()
"""All wrapped models of the process."""

_current: ContextVar[LogSubject | None] = ContextVar("rannd.log.subject", default=None)
