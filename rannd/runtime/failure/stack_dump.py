"""Stack dumps of this process's threads, and the activity of the thread that runs the model."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

import torch.distributed as dist

import rannd
from rannd.runtime.failure.position import SAVING, Where

DEEPEST = 60
"""Maximum number of frames shown per stack, innermost ones."""

_RANND = os.path.dirname(os.path.abspath(rannd.__file__)) + os.sep
_DIST = os.path.dirname(os.path.abspath(dist.__file__)) + os.sep
_WAITING = (_DIST, _RANND + "runtime" + os.sep, _RANND + os.path.join("device", "reads.py"))
_FILES = (_DIST + "checkpoint" + os.sep, _RANND + os.path.join("runtime", "storage") + os.sep)
"""What reads and writes files, which takes long in single calls, and waits for nobody."""
_OURS = (_RANND, os.path.join(os.path.dirname(os.path.dirname(_RANND)), "pyrannc") + os.sep)
_LIBRARIES = (
    *_OURS,
    os.path.dirname(os.path.dirname(_DIST)) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Prefixes of the names of files that are not the user's; `<` begins names of generated code."""
_ENGINE = "_engine_run_backward"
"""torch's function that calls the autograd engine, which has threads of its own."""
_THREADING = threading.Thread.join.__code__.co_filename
_JOINING = ("join", "_wait_for_tstate_lock", "_shutdown")
"""Functions there that wait for the end of a thread, the last one at the end of the script."""
_ACTIVITIES = {
    "graph": "tracing",
    "profile": "profiling",
    "plan": "planning",
    os.path.join("runtime", "compiling"): "compiling",
}
"""By folder of rannd."""


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
    `wait` of a transfer directly): anything else that takes long is other code. A thread in torch's autograd engine
    waits if a thread of the engine does: on GPUs, hooks run there.
    """
    frames = sys._current_frames()
    frame = frames.get(where.thread)
    if frame is None or not _inside(frame):
        return "script"
    if _waits(frame):
        return "waiting"
    if frame.f_code.co_name == _ENGINE:
        own = (where.thread, threading.get_ident())
        others = (each for ident, each in frames.items() if ident not in own and not _begun_by_python(each))
        if any(_waits(each) and _inside(each) for each in others):
            return "waiting"
    return "preparing" if where.preparing else "working"


def _waits(frame: FrameType) -> bool:
    """Whether a thread, whose innermost frame this is, waits for other ranks, or for the device."""
    name = frame.f_code.co_filename
    return name.startswith(_WAITING) and not name.startswith(_FILES)


def _begun_by_python(frame: FrameType) -> bool:
    """Whether a thread was started by `threading`, as a saver is, and not by torch."""
    *_, outermost = _outwards(frame)
    return outermost.f_code.co_filename == _THREADING


def joins(where: Where) -> bool:
    """Whether the thread that runs the model, or the main thread, waits for the end of another thread."""
    frames = sys._current_frames()
    codes = [frames[each].f_code for each in (where.thread, threading.main_thread().ident or 0) if each in frames]
    return any(code.co_filename == _THREADING and code.co_name in _JOINING for code in codes)


def line(where: Where) -> str:
    """Innermost line of the thread that runs the model: ``load (train.py:33: time.sleep(9))``."""
    frame = sys._current_frames().get(where.thread)
    if frame is None:
        return "a thread that has ended"
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    return f"{frame.f_code.co_name} ({os.path.basename(name)}:{number}{': ' + text if text else ''})"


def user_line(where: Where) -> str:
    """Innermost line of the user's own code, ``train.py:33``; '' if there is none.

    Of the thread that runs the model, else of the main thread: backward may run in a thread of torch.
    """
    for thread in (where.thread, threading.main_thread().ident or 0):
        for frame in _outwards(sys._current_frames().get(thread)):
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def entry(where: Where) -> str:
    """Name of the function of rannd that the user's code has called, as the user knows it; '' if none."""
    found = ""
    if where.call in ("forward", "backward", SAVING):
        return where.call  # also where a method of the model has called it
    for frame in _outwards(sys._current_frames().get(where.thread)):
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            *before, name = code.co_qualname.split(".")
            name = before[-1] if name == "__init__" and before else name
            found = found if name.startswith(("_", "<", "stand_in")) else name
        elif not code.co_filename.startswith(_LIBRARIES):
            break
    return found or where.call


def activity(where: Where) -> str:
    """``tracing``, ``compiling`` and so on, by the folder of rannd's innermost frame; '' for anything else."""
    for frame in _outwards(sys._current_frames().get(where.thread)):
        if frame.f_code.co_filename.startswith(_RANND):
            place = frame.f_code.co_filename.removeprefix(_RANND)
            return next((name for folder, name in _ACTIVITIES.items() if place.startswith(folder + os.sep)), "")
    return ""


def progress(where: Where) -> tuple[object, ...]:
    """Snapshot of the thread that runs the model, equal as long as it makes no progress."""
    lines = [(id(frame), frame.f_lasti) for frame in _outwards(sys._current_frames().get(where.thread))]
    return (*where.snapshot(), *lines)


def _inside(frame: FrameType | None) -> bool:
    return any(each.f_code.co_filename.startswith(_RANND) for each in _outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back
