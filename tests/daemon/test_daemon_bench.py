"""bench/daemon.py: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kept_results import KEPT, goals, tables

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--clients", "1", "2", "--lookups", "20", "--entries", "20", "300", "--deployments", "5", "--starts", "2")


def test_what_it_prints_is_kept_and_nothing_is_left(daemon_home, tmp_path) -> None:
    folder = daemon_home.base / "tmp"
    folder.mkdir()
    kept = tmp_path / "kept"
    done = subprocess.run(
        [sys.executable, "bench/daemon.py", *TINY],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), KEPT: str(kept)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ((_, rows),) = tables(kept).items()
    found = {row["what"]: row for row in rows}
    assert all(name in done.stdout for name in found)
    assert found["look-up, 2 clients in turn"]["median"] > 0
    assert found["look-up, 2 clients in turn"]["p99"] >= found["look-up, 2 clients in turn"]["median"]
    assert 5 < found["memory of the daemon, 300 entries"]["memory"] < 60
    assert found["start to first answer"]["median"] > found["python -I -S -c pass"]["median"]
    assert set(goals(kept)) == {"daemon-start", "daemon-memory"}, "those of 64 clients are not measured with two"
    assert list(folder.iterdir()) == []
    assert daemon_home.pids() == []
