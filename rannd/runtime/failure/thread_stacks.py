"""Stacks of this process's threads, read without frame objects.

`sys._current_frames` creates frame objects of other threads, which go on while these are read: CPython 3.11 crashes
there once in a long while (issues 99110 and 111363 of python/cpython), and may block (106883). `faulthandler` writes
all stacks in one go, while no other thread runs Python, and creates nothing.

But CPython 3.11 puts the state of a thread that native code makes, without holding the GIL, into the list of all before
it has values, and faulthandler follows the list: a crash once in a long while. So what is asked several times a second,
the stack of the main thread, is written by the function of CPython's that faulthandler calls for each thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST_LINES = 100
"""faulthandler's limit of the lines of one stack; it has the same limit of threads, the newest ones."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)$')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


@dataclass(frozen=True)
class CodeLine:
    """A line of Python that a thread is at."""

    file: str
    number: int
    """0 if unknown."""
    function: str
    """Its name, without that of its class."""


@dataclass(frozen=True)
class ThreadStack:
    """What a thread runs."""

    lines: Sequence[CodeLine]
    """Innermost first, never empty."""
    whole: bool
    """False if outer lines are missing, see `MOST_LINES`."""


def _function(name: str, result: Any, *given: Any) -> Callable[..., Any] | None:
    """A function of CPython's, called with the GIL; None where this interpreter does not tell it."""
    found = getattr(ctypes.pythonapi, name, None)
    if found is not None:
        found.restype, found.argtypes = result, given
    return found


_write = _function("_Py_DumpTraceback", None, ctypes.c_int, ctypes.c_void_p) if sys.version_info < (3, 12) else None
_state = _function("PyThreadState_Get", ctypes.c_void_p)


_main: int | None = None
"""Address of the state of the main thread, which lasts as long as the process."""


def note() -> None:
    """Note the main thread for `read_one`, if it is the calling one."""
    global _main
    if _main is None and _state is not None and threading.current_thread() is threading.main_thread():
        _main = _state()


def _forget() -> None:
    global _main
    _main = None


os.register_at_fork(after_in_child=_forget)  # the thread that forks is the main one there


def read_one(ident: int) -> ThreadStack | None:
    """Stack of one thread, by `threading.get_ident`; None if it does not run Python."""
    if _write is None or _main is None or ident != threading.main_thread().ident:
        return read().get(ident)
    with open(os.memfd_create("rannd-stack"), "w+b", buffering=0) as file:
        _write(file.fileno(), _main)
        file.seek(0)
        return _parsed(file.read(), ident).get(ident)


def read() -> dict[int, ThreadStack]:
    """Stacks of all threads that run Python, by `threading.get_ident`."""
    with open(os.memfd_create("rannd-stacks"), "w+b", buffering=0) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return _parsed(file.read(), 0)


def _parsed(written: bytes, ident: int) -> dict[int, ThreadStack]:
    """Stacks in faulthandler's text; `ident`: of the first one, if the text does not tell it."""
    text = written.decode("ascii", "replace")
    found: dict[int, list[CodeLine]] = {}
    cut: set[int] = set()
    for row in text.split("\n"):
        if begins := _THREAD.match(row):
            ident = int(begins[1], 16)
        elif line := _LINE.match(row):
            number = int(line[2]) if line[2].isdigit() else 0
            found.setdefault(ident, []).append(CodeLine(_unescaped(line[1]), number, _unescaped(line[3])))
        elif row == "  ...":
            cut.add(ident)
    return {ident: ThreadStack(tuple(lines), ident not in cut) for ident, lines in found.items()}


def _unescaped(text: str) -> str:
    """Text of which faulthandler has written all that is not ASCII as in literals."""
    return _ESCAPED.sub(lambda escape: chr(int(escape[0][2:], 16)), text)
