"""Copies of rannd with other numbers in them: what another version of it would be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import rannd

RUN = "from rannd.daemon.cli import main; main()"


def copy_of(folder: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """Make a copy of rannd in which lines of `daemon/**` are replaced; the variables with which Python finds it."""
    package = folder / "rannd"
    shutil.copytree(Path(rannd.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for old, new in changes.items():
        files = [file for file in package.glob("daemon/**/*.py") if old in file.read_text().splitlines()]
        assert len(files) == 1, (old, files)
        text = files[0].read_text().splitlines()
        files[0].write_text("\n".join(new if line == old else line for line in text) + "\n")
    return {"PYTHONPATH": str(folder)}


def run(variables: Mapping[str, str], program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that sees such a copy."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd="/",  # a program of -c finds first what is where it stands
    )
