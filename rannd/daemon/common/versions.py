"""The version of rannd, and comparison of versions."""

from __future__ import annotations

import re

from rannd import __version__


def version() -> str:
    """Return the version of rannd."""
    return __version__


def is_older(theirs: str, ours: str) -> bool:
    """Whether release `theirs` is older than release `ours`; suffixes (``rc1``, ``+cpu``) do not count."""
    return _release(theirs) < _release(ours)


def _release(text: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in matched.group().split(".")] if matched else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
