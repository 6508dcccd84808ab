"""rannc-run's own process starts ranks, and imports nothing that computes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transcript import program

pytestmark = pytest.mark.ranks

JOB = """
import json, sys
from rannd.runner.run import main
assert main(["-np", "1", "--show-ranks", "0", sys.argv[1]], standalone_mode=False) == 0
slow = ("torch", "numpy", "sympy", "zmq", "psutil", "sqlite3")
print("\\n" + json.dumps([name for name in slow if name in sys.modules]))
"""


def imported() -> str:
    """What the process of rannc-run imported of what takes long, while it ran a job."""
    command = [sys.executable, "-c", JOB, program("no_newline.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_it_imports_no_torch(daemon_home) -> None:
    assert "torch" not in imported()  # starts the daemon
    assert daemon_home.pids()


def test_where_the_daemon_runs_it_needs_no_zeromq_either(daemon_home) -> None:
    imported()
    assert imported() == "[]"
