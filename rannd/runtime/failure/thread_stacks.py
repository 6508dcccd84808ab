"""Stacks of this process's threads, read without frame objects.

`sys._current_frames` creates frame objects of other threads, which go on while these are read: CPython 3.11 crashes
there once in a long while (issues 99110 and 111363 of python/cpython), and may block (106883). `faulthandler` writes
all stacks in one go, while no other thread runs Python, and creates nothing.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def read() -> dict[int, ThreadStack]:
    """Stacks of all threads that run Python, by `threading.get_ident`."""
    with open(os.memfd_create("rannd-stacks"), "w+b", buffering=0) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("ascii", "replace")
    found: dict[int, list[CodeLine]] = {}
    cut: set[int] = set()
    ident = 0
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
