"""Lets a script that only plans (``rannc-run --plan-only``) report to ``rannc-run`` that there is a plan.

It touches a file that an environment variable names. The exit code cannot report this: a script that never calls its
model also exits with 0.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "RANND_PLANNED"
"""Environment variable with the path of the file to touch."""


@contextlib.contextmanager
def awaited() -> Iterator[Path]:
    """Yield a path that does not exist yet, in a temporary directory that only this user can access."""
    with tempfile.TemporaryDirectory(prefix="rannc-run-") as folder:
        yield Path(folder) / "planned"


def tell() -> None:
    """Report that a plan was made; no-op if `VARIABLE` is not set."""
    if VARIABLE in os.environ:
        Path(os.environ[VARIABLE]).touch()
