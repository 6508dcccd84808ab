"""Patterns of log lines, as spdlog has them: which flags there are, and what Python puts in their place.

The same flags are known with and without the package spdlog, so that a file that is right stays right.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

#: The logger all of ours are below.
BASE = "rannd"

_FLAG = re.compile(r"%(?:(?P<side>[-=]?)(?P<width>[0-9]{1,2})(?P<cut>!?))?(?P<flag>.)?", re.DOTALL)
_UNALIGNED = "%^$"
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_MAX_WIDTH = 64  # spdlog silently takes this for anything wider
#: Smallest level of each of spdlog's names for levels, and its colour in a terminal.
_LEVELS = (
    (logging.CRITICAL, "critical", "C", "\033[1m\033[41m"),
    (logging.ERROR, "error", "E", "\033[31m\033[1m"),
    (logging.WARNING, "warning", "W", "\033[33m\033[1m"),
    (logging.INFO, "info", "I", "\033[32m"),
    (logging.DEBUG, "debug", "D", "\033[36m"),
    (0, "trace", "T", "\033[37m"),
)
_COLOUR_END = "\033[m"

_Flag = Callable[[logging.LogRecord, time.struct_time], str]


def display_name(name: str) -> str:
    """The name of a Python logger as the user knows it: below ``rannd``, and ``root`` for that itself."""
    return "root" if name == BASE else name.removeprefix(f"{BASE}.")


def spdlog_level(levelno: int) -> int:
    """The level's place in spdlog's order: 0 trace, 1 debug, 2 info, 3 warn, 4 err, 5 critical."""
    return next(5 - index for index, row in enumerate(_LEVELS) if levelno >= row[0] or row[0] == 0)


def _level(record: logging.LogRecord) -> tuple[int, str, str, str]:
    return _LEVELS[5 - spdlog_level(record.levelno)]


def _zone(record: logging.LogRecord, local: time.struct_time) -> str:
    minutes = (local.tm_gmtoff or 0) // 60
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


def _numbers(form: str) -> _Flag:
    """A flag of digits only, which no locale changes."""
    return lambda record, local: time.strftime(form, local)


def _half(local: time.struct_time) -> str:
    return "PM" if local.tm_hour >= 12 else "AM"


def _fraction(record: logging.LogRecord, digits: int) -> str:
    nanoseconds = int((record.created - int(record.created)) * 1e9)
    return f"{nanoseconds:09}"[:digits]


_FLAGS: dict[str, _Flag] = {
    "v": lambda record, local: record.message,
    "n": lambda record, local: display_name(record.name),
    "l": lambda record, local: _level(record)[1],
    "L": lambda record, local: _level(record)[2],
    # Formatting happens in the thread that logs; record.thread is not the number that the system knows.
    "t": lambda record, local: str(threading.get_native_id()),
    "P": lambda record, local: str(record.process),
    "a": lambda record, local: _DAYS[local.tm_wday][:3],
    "A": lambda record, local: _DAYS[local.tm_wday],
    "b": lambda record, local: _MONTHS[local.tm_mon - 1][:3],
    "h": lambda record, local: _MONTHS[local.tm_mon - 1][:3],
    "B": lambda record, local: _MONTHS[local.tm_mon - 1],
    "Y": _numbers("%Y"),
    "C": _numbers("%y"),  # spdlog's %C are the last two digits of the year
    "m": _numbers("%m"),
    "d": _numbers("%d"),
    "H": _numbers("%H"),
    "I": _numbers("%I"),
    "M": _numbers("%M"),
    "S": _numbers("%S"),
    "D": _numbers("%m/%d/%y"),
    "R": _numbers("%H:%M"),
    "T": _numbers("%H:%M:%S"),
    "X": _numbers("%H:%M:%S"),
    "r": lambda record, local: f"{time.strftime('%I:%M:%S', local)} {_half(local)}",
    "p": lambda record, local: _half(local),
    "e": lambda record, local: _fraction(record, 3),
    "f": lambda record, local: _fraction(record, 6),
    "F": lambda record, local: _fraction(record, 9),
    "E": lambda record, local: str(int(record.created)),
    "z": _zone,
}

FLAGS = "".join(_FLAGS) + _UNALIGNED


def unknown_flag(pattern: str) -> str | None:
    """The first part of a pattern that is no known flag, None where all are."""
    for match in _FLAG.finditer(pattern):
        flag, width = match["flag"] or "", match["width"]
        if not flag or flag not in FLAGS or (width and (int(width) > _MAX_WIDTH or flag in _UNALIGNED)):
            return match[0]
    return None


class PatternFormatter(logging.Formatter):
    """Formats records by a pattern, which must have no unknown flag."""

    def __init__(self, pattern: str, *, colour: bool = False) -> None:
        super().__init__()
        self._parts: list[str | _Flag] = []
        end = 0
        for match in _FLAG.finditer(pattern):
            self._parts += [pattern[end : match.start()], self._part(match, colour)]
            end = match.end()
        self._parts.append(pattern[end:])

    @staticmethod
    def _part(match: re.Match[str], colour: bool) -> str | _Flag:
        flag = match["flag"]
        if flag == "%":
            return "%"
        if flag in "^$":
            if not colour:
                return ""
            return _COLOUR_END if flag == "$" else lambda record, local: _level(record)[3]
        text = _FLAGS[flag]
        if match["width"] is None:
            return text
        width, cut = int(match["width"]), bool(match["cut"])
        side = {"": ">", "-": "<", "=": "^"}[match["side"]]

        def aligned(record: logging.LogRecord, local: time.struct_time) -> str:
            padded = f"{text(record, local):{side}{width}}"
            return padded[:width] if cut else padded

        return aligned

    def format(self, record: logging.LogRecord) -> str:
        record.message = super().format(record)  # with the traceback, where there is one
        local = time.localtime(record.created)
        return "".join(part if isinstance(part, str) else part(record, local) for part in self._parts)
