"""Processes by session."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
from transcript import Witness, read_lines

from rannd.runner.watch import processes

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

# Makes a guarded leader that obeys SIGTERM, as it gets when its parent dies, and leaves a child behind.
GUARDED = """
import os, signal, sys
from rannd.runner.watch import processes
own = os.getpid()
leader = os.fork()
if leader == 0:
    os.setsid()
    processes.die_with_parent(own, signal.SIGTERM)
    child = os.fork()
    if child:
        os.write(1, f"{child}\\n".encode())
    signal.pause()
processes.Guard(leader, 60.0)
signal.pause()
"""


def test_a_guard_ends_what_an_obedient_leader_leaves() -> None:
    parent = subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True)
    (child,) = read_lines(parent.stdout, 1)
    witness = Witness(int(child))
    # The guard is there once the leader has a sibling.
    while len(psutil.Process(parent.pid).children()) < 2:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()
    assert witness.ended()


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
