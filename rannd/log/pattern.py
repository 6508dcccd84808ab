"""Checks the patterns of log lines in logging.toml: an unknown flag is an error, as spdlog would print it verbatim."""

from __future__ import annotations

import re

#: The flags of spdlog that logging.toml may use; `%^` and `%$`, which take no width, begin and end the colored part.
FLAGS = "vnlLtPaAbhBYCmdHIMSDRTXrpefFEz%^$"

_FLAG = re.compile(r"%(?:[-=]?(?P<width>[0-9]{1,2})!?)?(?P<flag>.)?", re.DOTALL)
_UNALIGNED = "%^$"
_MAX_WIDTH = 64  # spdlog silently replaces larger widths by this one


def unknown_flag(pattern: str) -> str | None:
    """The first part of a pattern that is not a known flag; None if all are known."""
    for match in _FLAG.finditer(pattern):
        flag, width = match["flag"] or "", match["width"]
        if not flag or flag not in FLAGS or (width and (int(width) > _MAX_WIDTH or flag in _UNALIGNED)):
            return match[0]
    return None
