"""What a failed rank said last, in one line: its exception and where, or the last line of its standard error."""

from __future__ import annotations

import os
import re

_RANK = re.compile(r"^\[rank\d+\]: ")
"""torch's mark on each line of a traceback, if a process group exists."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+)(, in |$)')
_SYNTAX = re.compile(r"(Syntax|Indentation|Tab)Error\b")
"""Errors of the script itself, which come without a traceback."""
_LIBRARY = re.compile(r"^<|/(site-packages|dist-packages|lib/python3\.\d+)/")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
NO_WORDS = "-"
NOTE = "rannd: "
"""Begins notes below an exception, which say where rannd was."""


def last_words(tail: str) -> str:
    """One line from the end of a standard error; NO_WORDS if it is empty.

    Of a Python traceback it is the exception, and the last line of the user's code that it went through: the exception
    line is the first one behind the frames that is not indented.
    """
    lines = [_RANK.sub("", line) for line in tail.splitlines()]
    start = max((number for number, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=-1)
    frames = [(number, found) for number, line in enumerate(lines) if number > start and (found := _FRAME.match(line))]
    if frames and (start >= 0 or any(map(_SYNTAX.match, lines))):
        behind = lines[frames[-1][0] + 1 :]
        error = next((line.strip() for line in behind if line.strip() and not line.startswith(" ")), "")
        if error and not error.startswith(NOTE):
            own = [each for _, each in frames if not (_LIBRARY.search(each["file"]) or each["file"].startswith(_OWN))]
            place = f" ({os.path.basename(own[-1]['file'])}:{own[-1]['line']})" if own else ""
            return error + place
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith(NOTE)), NO_WORDS)
