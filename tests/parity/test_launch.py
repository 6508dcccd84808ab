"""Starting ranks: what hangs or fails is named, and nothing is left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import psutil
import pytest
from parity.case import Case
from parity.launch import Home, run


@pytest.mark.ranks
@pytest.mark.long
def test_a_case_that_hangs_says_where_and_leaves_no_process() -> None:
    home = Home()
    case = Case("mean", ranks=2)
    # nothing trains in a millisecond: for the worker this case hangs
    outcome = run([case], home, "ddp", case_seconds=0.001)[case.name]
    assert outcome.records == []
    assert "hangs" in outcome.error
    assert "most recent call first" in outcome.error
    assert [process for process in home.strays() if "worker.py" in " ".join(process.cmdline())] == []
    home.close()


def test_a_home_is_private_and_ends_with_what_lives_in_it() -> None:
    home = Home()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert len(os.fsencode(home.path)) < 40
    sleep = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleep, env=home.environment(), stdin=subprocess.PIPE) as sleeper:
        assert [process.pid for process in home.strays()] == [sleeper.pid]
        home.close()
        assert not psutil.pid_exists(sleeper.pid)
    assert not home.path.exists()
