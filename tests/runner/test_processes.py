"""Processes by session."""

from __future__ import annotations

import subprocess
import sys

from transcript import Witness, read_lines

from rannd.runner import processes

# A session leader, a child in a group of its own, and one that left the session; names may look like anything.
FAMILY = """
import os
if os.fork() == 0:
    os.setpgid(0, 0)
elif os.fork() == 0:
    os.setsid()
open("/proc/self/comm", "w").write(") R 1 1 (")
os.write(1, f"{os.getpid()} {os.getsid(0) == os.getpid()}\\n".encode())
os.read(0, 1)
"""


def test_a_session_ends_and_whoever_left_it_lives() -> None:
    # All of them end when their standard input does: none outlives this test, however it ends.
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        told = [line.split() for line in read_lines(process.stdout, 3)]
        gone_away = next(int(pid) for pid, leader in told if leader == "True" and int(pid) != process.pid)
        members = {int(pid) for pid, _ in told} - {gone_away}
        witnesses = [Witness(pid) for pid in members]
        assert set(processes.session_members(process.pid)) == members
        assert processes.session_members(gone_away) == [gone_away]
        assert processes.process_name(process.pid) == ") R 1 1 ("
        processes.kill_session(process.pid)
        assert all(witness.ended() for witness in witnesses)
        assert processes.session_members(process.pid) == []
        assert processes.session_members(gone_away) == [gone_away]
    assert processes.process_name(process.pid) == "?"
