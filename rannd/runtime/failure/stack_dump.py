"""Stack dumps of this process's threads, and the activity of the thread that runs the model."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from types import FrameType

import torch.distributed as dist

import rannd
from rannd.runtime.failure.position import Where

DEEPEST = 60
"""Maximum number of frames shown per stack, innermost ones."""

_RANND = os.path.dirname(os.path.abspath(rannd.__file__)) + os.sep
_WAITING = (os.path.dirname(os.path.abspath(dist.__file__)) + os.sep, _RANND + "runtime" + os.sep)


def dump() -> str:
    """Stacks of all threads except the calling one, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        lines = traceback.format_stack(frame)[-DEEPEST:]
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return "\n".join(sorted(parts, key=lambda part: not part.startswith("thread MainThread")))


def doing(where: Where) -> str:
    """Activity of the thread that runs the model: ``waiting`` for ranks, ``preparing``, ``working`` or ``script``.

    It counts as waiting if Python's innermost frame is in torch.distributed or in rannd's runtime (which calls the
    `wait` of a transfer directly): anything else that takes long is other code.
    """
    frame = sys._current_frames().get(where.thread)
    if frame is None or not _inside(frame):
        return "script"
    if frame.f_code.co_filename.startswith(_WAITING):
        return "waiting"
    return "preparing" if where.preparing else "working"


def line(where: Where) -> str:
    """Innermost line of the thread that runs the model: ``load (train.py:33: time.sleep(9))``."""
    frame = sys._current_frames().get(where.thread)
    if frame is None:
        return "a thread that has ended"
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    return f"{frame.f_code.co_name} ({os.path.basename(name)}:{number}{': ' + text if text else ''})"


def progress(where: Where) -> tuple[object, ...]:
    """Snapshot of the thread that runs the model, equal as long as it makes no progress."""
    frame = sys._current_frames().get(where.thread)
    lines = []
    while frame is not None:
        lines.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return (*where.snapshot(), *lines)


def _inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_RANND):
            return True
        frame = frame.f_back
    return False
