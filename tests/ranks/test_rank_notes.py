"""What a rank says of its training reaches whoever has the other end of the pipe, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rannd.ranks import rank_notes

SCRIPT = """
import os, subprocess, sys
from rannd.ranks import rank_notes
rank_notes.give(int(sys.argv[1]))
if sys.argv[2] == "child":
    code = "from rannd.ranks import rank_notes; rank_notes.tell(step=1)"
    subprocess.run([sys.executable, "-c", code], check=True, close_fds=False)
    if os.fork() == 0:
        rank_notes.tell(step=2)
        os._exit(0)
    os.wait()
else:
    rank_notes.tell(step=3, saved=2)
"""


def _said(what: str) -> bytes:
    read_end, write_end = os.pipe()
    try:
        subprocess.run([sys.executable, "-c", SCRIPT, str(write_end), what], check=True, pass_fds=[write_end])
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        return file.read()


def test_a_rank_is_heard() -> None:
    assert _said("rank") == b'{"step": 3, "saved": 2}\n'


def test_processes_that_a_rank_has_started_are_not() -> None:
    assert _said("child") == b""


def test_without_a_listener_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rank_notes.VARIABLE, raising=False)
    rank_notes.tell(step=1)
    monkeypatch.setenv(rank_notes.VARIABLE, f"999:{os.getpid()}")
    rank_notes.tell(step=1)  # its listener is gone
