"""Folders of compiled code beside the store, one for each entry of kind `compiled`, with the entry's key as its name.

Jobs make them; the store removes them together with their entries, and what is left over from jobs that were killed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

LEFT_S = 86400.0
"""Seconds after which a folder without an entry is removed: a job enters its folders when it has made all of them."""

_KEY = re.compile(r"[0-9a-f]{40}")


def remove(folder: str, keys: Iterable[object]) -> None:
    """Remove the folders of some entries."""
    for key in keys:
        if isinstance(key, str) and _KEY.fullmatch(key) and os.path.isdir(path := os.path.join(folder, key)):
            shutil.rmtree(path, ignore_errors=True)


def sweep(folder: str, known: Collection[str]) -> int:
    """Remove folders that have no entry in `known` and were not changed for a day; return how many."""
    found = 0
    with suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with suppress(OSError):
                if name not in known and os.lstat(path).st_mtime < time.time() - LEFT_S:
                    shutil.rmtree(path, ignore_errors=True)
                    found += 1
    return found
