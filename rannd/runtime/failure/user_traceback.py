"""Uncaught errors that rannd raises on purpose show the user's own lines, without the frames of rannd and of torch.

Their message says what was wrong and what to do; the frames between it and the script's line are of no use to the user.
With log_level=debug tracebacks are left whole.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rannd.errors import RanndError

_INSIDE = ("rannd", "pyrannc", "torch")
_GENERATED = ("<eval_with_key", "<frozen", "<torch_package", "<@beartype")
"""Names of files of generated code: graphs that run, the import system."""
_MOST_CAUSES = 20
_installed = False


def shorten_tracebacks() -> None:
    """Install the hook for uncaught exceptions, once in a process; hooks that are there are called by it."""
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        if isinstance(exc, RanndError) and not logging.getLogger("rannd").isEnabledFor(logging.DEBUG):
            trace = users_frames(trace)
            exc.__traceback__ = trace
            _shorten_causes(exc)
        before(kind, exc, trace)

    sys.excepthook = hook


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of rannd, of torch, and of generated code."""
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in _INSIDE and not frame.f_code.co_filename.startswith(_GENERATED):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _shorten_causes(exc: BaseException) -> None:
    """The same for what an error came from. A cause in which none of the user's code ran is not shown."""
    for _ in range(_MOST_CAUSES):
        cause = exc.__cause__ if exc.__cause__ is not None or exc.__suppress_context__ else exc.__context__
        if cause is None:
            return
        trace = users_frames(cause.__traceback__)
        if trace is None:
            exc.__cause__ = None  # sets __suppress_context__, too
            return
        cause.__traceback__ = trace
        exc = cause
