"""Watches what code does through Python's audit events (PEP 578): reading data must not import, run or write."""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from fuzz.mutation import CANARY

_REFUSED = (
    "ctypes.",
    "exec.",
    "ftplib.",
    "os.",
    "pty.",
    "shutil.",
    "socket.",
    "subprocess.",
    "urllib.",
    "winreg.",
    "webbrowser.",
)
"""How events begin that decoding has no reason for."""
_HARMLESS = ("os.listdir", "os.scandir", "os.getxattr", "os.fwalk", "os.walk")
_LIBRARIES = ("torch", "sympy", "mpmath", "numpy", "rannd", "encodings")
"""Packages that load parts of themselves when they are used for the first time."""


Allowed: TypeAlias = Callable[[str, tuple[Any, ...]], bool]
"""Whether an event, by its name and arguments, is one that the code has a reason for."""


class Violation(Exception):
    """Something happened that decoding data must not do."""


_watching = threading.local()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    seen = getattr(_watching, "seen", None)
    if seen is None:
        return
    _watching.seen = None  # what follows has events of its own
    try:
        told = "" if _watching.allowed(event, arguments) else _wrong(event, arguments)
        if told:
            seen.append(told)
            raise Violation(told)
    finally:
        _watching.seen = seen


def _wrong(event: str, arguments: tuple[Any, ...]) -> str:
    if event == "import":
        name = str(arguments[0])
        return "" if name.partition(".")[0] in _LIBRARIES or name in sys.stdlib_module_names else f"import {name}"
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return f"open {path} {mode}" if writes or CANARY in str(path) else ""
    if event == "compile" and arguments[0] is not None:
        return _wrong_code(arguments[0])
    if event.startswith(_REFUSED) and event not in _HARMLESS:
        return f"{event} {arguments!r:.200}"
    return ""


def _wrong_code(source: Any) -> str:
    """Generated code that uses a name of the canary's, other than in a string."""
    text = source if isinstance(source, str) else source.decode() if isinstance(source, bytes) else ""
    if CANARY not in text:
        return ""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return f"code that is none: {text[:300]}"
    names = [str(getattr(node, field, "")) for node in nodes for field in ("id", "attr", "arg", "name")]
    return f"code with {CANARY}: {text[:300]}" if any(CANARY in name for name in names) else ""


sys.addaudithook(_audit)


class Found:
    """What was seen while decoding."""

    def __init__(self) -> None:
        self.runs = 0
        self.refused = 0
        self.seconds = 0.0
        """Of the slowest."""
        self.violations: list[str] = []
        self.before = _peak_bytes()

    @property
    def grown(self) -> int:
        """Bytes by which the process has grown at most."""
        return _peak_bytes() - self.before

    @contextlib.contextmanager
    def watched(self, allowed: Allowed = lambda event, arguments: False) -> Iterator[None]:
        """Watch what this thread does: one attempt to decode something, or a process that listens."""
        begin, _watching.seen, _watching.allowed = time.monotonic(), [], allowed
        try:
            yield
        finally:
            self.violations += _watching.seen
            _watching.seen = None
            self.runs += 1
            self.seconds = max(self.seconds, time.monotonic() - begin)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
