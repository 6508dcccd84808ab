"""Digests of rannd's own source files, for keys: code that was edited under the same version may give other results."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

HOME = Path(__file__).parent

TRACING = ("graph", "device", "patches.py", "torch_mends.py", "torch_versions.py")
"""Files that decide what the trace of a model is. A folder stands for all files in it and below."""

CHECKING = ("runtime/traces",)
"""Files that decide which trace is kept for a call, and what is kept about its comparison with the model."""

PLANNING = (*TRACING, "profile", "plan", "runtime/planning", "runtime/costs", "runtime/compiling")
"""Files that decide what is measured, and what a plan is."""


def files_of(places: tuple[str, ...]) -> list[Path]:
    """The files that `places`, paths below the package, stand for. FileNotFoundError where one stands for none."""
    found: set[Path] = set()
    for place in places:
        path = HOME / place
        files = list(path.rglob("*.py")) if path.is_dir() else [path]
        if not all(file.is_file() for file in files) or not files:
            raise FileNotFoundError(f"{path} is no source file of rannd, and no folder with one")
        found.update(files)
    return sorted(found)


@functools.cache
def digest_of(places: tuple[str, ...]) -> str:
    """Digest of the names and contents of files. They are read once, as their code is loaded once."""
    digest = hashlib.sha256()
    for file in files_of(places):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(HOME).as_posix()} {content}\n".encode())
    return digest.hexdigest()
