"""How a script that was started to plan only tells ``rannc-run --plan-only`` that it has planned.

The exit code cannot: a script that never calls its model ends with 0, too.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "RANND_PLANNED"
"""Names the file that is made behind a plan."""


@contextlib.contextmanager
def awaited() -> Iterator[Path]:
    """A file that does not exist, in a directory of this user's alone that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="rannc-run-") as folder:
        yield Path(folder) / "planned"


def tell() -> None:
    """There is a plan."""
    if VARIABLE in os.environ:
        Path(os.environ[VARIABLE]).touch()
