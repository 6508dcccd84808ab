"""Runs commands of the project as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import fork_server
from parity.launch import Home

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sysconfig.get_path("scripts")
FORK = fork_server.__file__
"""Before a script in a command: its ranks are forks. Not where processes are the subject, see there."""
PLANNED, FROM_CACHE = "[RaNNCModule] [info] Plan: ", "[RaNNCModule] [info] Plan from the cache ("
"""What a job says of a plan that it made, and of one that was made before."""
DEBUG = {"RANNC_LOG_LEVEL": "debug"}
"""Variables of a job that also tells what RaNNC's tutorial shows, and of traces."""


class Job:
    """Runs commands of the project as a user would, in a home of its own.

    Args:
        forks: the socket of the fork server that `FORK` takes ranks from.
    """

    def __init__(self, forks: Path) -> None:
        self.home = Home()
        self.environment = {**self.home.environment(), "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
        self.environment[fork_server.VARIABLE] = str(forks)  # for who asks for it: other ranks do not look at it

    def run(self, *command: str, code: int = 0, folder: Path | None = None, **variables: str) -> str:
        """Output of a command that ends with `code`."""
        ended, output = self.end(*command, folder=folder, **variables)
        assert ended == code, f"{' '.join(command)} ended with {ended}:\n{output}"
        return output

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """A running command, whose output and end are the caller's."""
        return subprocess.Popen(
            command,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    def end(self, *command: str, folder: Path | None = None, **variables: str) -> tuple[int, str]:
        """(code with which a command ends, output)."""
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
        return done.returncode, done.stdout

    def interrupted(self, *command: str, ready: str, signum: signal.Signals, seconds: float) -> tuple[int, str]:
        """The same of a command that gets a signal, SIGINT as from a terminal, once two ranks have printed `ready`."""
        started = subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines = []
        try:
            assert started.stdout is not None
            for line in started.stdout:
                lines.append(line)
                if sum(ready in each for each in lines) == 2:
                    break
            if signum == signal.SIGINT:
                os.killpg(started.pid, signum)
            else:
                started.send_signal(signum)
            rest, _ = started.communicate(timeout=seconds)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        return started.returncode, "".join(lines) + rest

    def train(self, ranks: int, *script: str, code: int = 0, **variables: str) -> str:
        """Output of a script under rannc-run; its ranks are forks."""
        return self.run("rannc-run", "-np", str(ranks), FORK, *script, code=code, **variables)

    def alone(self, *script: str, code: int = 0, **variables: str) -> str:
        """Output of a script in one process, a fork, without rannc-run."""
        return self.run(sys.executable, FORK, *script, code=code, **variables)
