"""Runs commands of the project as a user would."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from parity.launch import Home

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sysconfig.get_path("scripts")


class Job:
    """Runs commands of the project as a user would, in a home of its own."""

    def __init__(self) -> None:
        self.home = Home()
        self.environment = {**self.home.environment(), "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *command: str, code: int = 0, folder: Path | None = None, **variables: str) -> str:
        """Output of a command that ends with `code`."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder or ROOT,
            check=False,
            timeout=400,
        )
        assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def train(self, ranks: int, *script: str, code: int = 0, **variables: str) -> str:
        """Output of a script under rannc-run."""
        return self.run("rannc-run", "-np", str(ranks), *script, code=code, **variables)
