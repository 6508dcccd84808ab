"""Stack dumps of this process's threads, and the activity of the thread that runs the model."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist

import rannd
from rannd.runtime.failure import thread_stacks
from rannd.runtime.failure.position import SAVING, Where
from rannd.runtime.failure.thread_stacks import CodeLine, ThreadStack

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
    for ident, stack in thread_stacks.read().items():
        if ident == threading.get_ident():
            continue
        shown = reversed(stack.lines[:DEEPEST])
        summaries = [traceback.FrameSummary(each.file, each.number, each.function) for each in shown]
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_list(summaries))}")
    return "\n".join(sorted(parts, key=lambda part: not part.startswith("thread MainThread")))


def doing(where: Where) -> str:
    """Activity of the thread that runs the model: ``waiting`` for ranks, ``preparing``, ``working`` or ``script``.

    It counts as waiting if Python's innermost line is in torch.distributed or in rannd's runtime (which calls the
    `wait` of a transfer directly): anything else that takes long is other code. A thread in torch's autograd engine
    waits if a thread of the engine does: on GPUs, hooks run there.
    """
    stack = thread_stacks.read_one(where.thread)
    if stack is None or not (_inside(stack) or (not stack.whole and where.depth)):
        return "script"
    if _waits(stack):
        return "waiting"
    if stack.lines[0].function == _ENGINE:
        own = (where.thread, threading.get_ident())
        stacks = thread_stacks.read().items()
        others = (each for ident, each in stacks if ident not in own and not _begun_by_python(each))
        if any(_waits(each) and _inside(each) for each in others):
            return "waiting"
    return "preparing" if where.preparing else "working"


def _waits(stack: ThreadStack) -> bool:
    """Whether a thread waits for other ranks, or for the device."""
    file = stack.lines[0].file
    return file.startswith(_WAITING) and not file.startswith(_FILES)


def _begun_by_python(stack: ThreadStack) -> bool:
    """Whether a thread was started by `threading`, as a saver is, and not by torch."""
    return stack.lines[-1].file == _THREADING


def _inside(stack: ThreadStack) -> bool:
    return any(each.file.startswith(_RANND) for each in stack.lines)


def joins(where: Where) -> bool:
    """Whether the thread that runs the model, or the main thread, waits for the end of another thread."""
    innermost = [stack.lines[0] for stack in _of_script(where)]
    return any(each.file == _THREADING and each.function in _JOINING for each in innermost)


def line(where: Where) -> str:
    """Innermost line of the thread that runs the model: ``load (train.py:33: time.sleep(9))``."""
    lines = _lines(where)
    if not lines:
        return "a thread that has ended"
    text = linecache.getline(lines[0].file, lines[0].number).strip()
    return f"{lines[0].function} ({_place(lines[0])}{': ' + text if text else ''})"


def user_line(where: Where) -> str:
    """Innermost line of the user's own code, ``train.py:33``; '' if there is none.

    Of the thread that runs the model, else of the main thread: backward may run in a thread of torch.
    """
    lines = (each for stack in _of_script(where) for each in stack.lines)
    return next((_place(each) for each in lines if not each.file.startswith(_LIBRARIES)), where.user_line)


def line_of_caller() -> str:
    """Innermost line of the user's own code in the calling thread, ``train.py:33``; '' if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def entry(where: Where) -> str:
    """Name of the function of rannd that the user's code has called, as the user knows it; '' if none."""
    found = ""
    if where.call in ("forward", "backward", SAVING):
        return where.call  # also where a method of the model has called it
    for each in _lines(where):
        if each.file.startswith(_OURS):
            name = _class_of(each) if each.function == "__init__" else each.function
            found = found if name.startswith(("_", "<", "stand_in")) else name
        elif not each.file.startswith(_LIBRARIES):
            break
    return found or where.call


def activity(where: Where) -> str:
    """``tracing``, ``compiling`` and so on, by the folder of rannd's innermost line; '' for anything else."""
    stack = thread_stacks.read_one(where.thread)
    for each in stack.lines if stack else ():
        if each.file.startswith(_RANND):
            place = each.file.removeprefix(_RANND)
            return next((name for folder, name in _ACTIVITIES.items() if place.startswith(folder + os.sep)), "")
    return "preparing" if stack and not stack.whole and where.preparing else ""


def progress(where: Where) -> tuple[object, ...]:
    """Snapshot of the thread that runs the model, equal as long as it makes no progress."""
    return (*where.snapshot(), *_lines(where))


def _lines(where: Where) -> Sequence[CodeLine]:
    """Lines of the thread that runs the model; none if it has ended."""
    stack = thread_stacks.read_one(where.thread)
    return () if stack is None else stack.lines


def _of_script(where: Where) -> list[ThreadStack]:
    """Stacks of the thread that runs the model and of the main thread, as far as they run."""
    found = map(thread_stacks.read_one, (where.thread, threading.main_thread().ident or 0))
    return [each for each in found if each is not None]


def _place(line: CodeLine) -> str:
    return f"{os.path.basename(line.file)}:{line.number}"


def _class_of(line: CodeLine) -> str:
    """Name of the class whose method a line of rannd is in."""
    tree = ast.parse("".join(linecache.getlines(line.file)))
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and each.lineno <= line.number <= (each.end_lineno or 0)
    ]
    return max(around, key=lambda each: each.lineno).name if around else line.function
