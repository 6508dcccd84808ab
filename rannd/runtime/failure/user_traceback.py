"""Shorten tracebacks of uncaught RanndErrors to the user's own frames, without those of rannd and torch.

The message of such an error says what was wrong and what to do; frames inside rannd and torch do not help the user. Nor
do they after Ctrl-C, which each rank tells.
With log_level=debug tracebacks are complete.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rannd.errors import RanndError

_INSIDE = ("rannd", "pyrannc", "torch")
_GENERATED = ("<eval_with_key", "<frozen", "<torch_package", "<@beartype")
"""File name prefixes of generated code: FX graphs, the import system."""
_MOST_CAUSES = 20
_installed = False


def shorten_tracebacks() -> None:
    """Install the hook for uncaught exceptions, once per process; it calls the previously installed hook."""
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        shortened = isinstance(exc, RanndError | KeyboardInterrupt)
        if shortened and not logging.getLogger("rannd").isEnabledFor(logging.DEBUG):
            trace = users_frames(trace)
            exc.__traceback__ = trace
            _shorten_causes(exc)
        before(kind, exc, trace)

    sys.excepthook = hook


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Copy a traceback without the frames of rannd, torch and generated code."""
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        file = frame.f_code.co_filename
        generated = file.startswith(_GENERATED) or (file == "<string>" and module != "__main__")
        if module.split(".")[0] not in _INSIDE and not generated:
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _shorten_causes(exc: BaseException) -> None:
    """Shorten the tracebacks of an error's causes; a cause without user frames is dropped."""
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
