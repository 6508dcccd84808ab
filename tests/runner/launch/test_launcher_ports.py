"""The ports of a process that are closed to other machines: the kernel binds them to the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rannd.runner.launch.launcher_ports import close_session_to_others, close_to_others

LISTENS = """
import socket, sys
open_to_all, inside = socket.create_server(("", 0)), socket.create_server(("", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind("")
unix.listen()
print(open_to_all.getsockname()[1], flush=True)
sys.stdin.readline()
for each in (open_to_all, inside, unix):
    print(each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\\0").decode())
"""


def test_listening_sockets_are_bound_and_still_accept_from_this_machine() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    close_to_others(process.pid)
    close_to_others(process.pid)  # again is the same
    socket.create_connection(("127.0.0.1", port), timeout=30).close()
    out, _ = process.communicate("\n", timeout=30)
    assert out.splitlines() == ["lo", "lo", ""]


def test_a_launcher_that_is_a_script_around_the_one_that_listens(tmp_path: Path) -> None:
    script = tmp_path / "mpirun"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    process = subprocess.Popen(
        [script, sys.executable, "-c", LISTENS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    close_session_to_others(process.pid)
    out, _ = process.communicate("\n", timeout=30)
    assert out.splitlines() == ["lo", "lo", ""]


def test_a_process_that_has_ended_is_an_os_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(OSError, match="No such process"):
        close_to_others(pid)
