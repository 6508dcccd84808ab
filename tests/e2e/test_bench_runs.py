"""Each run of `make bench` in its smallest form: scripts keep up with what they measure."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job import ROOT, Job

QUICK = {"planner", "page", "graph", "analytic", "coverage"}
"""Runs that `make test-long` tries; `make test-full` tries all."""


NAMES = re.findall(r'    Run\(\s*"([\w-]+)"', (ROOT / "bench" / "all.py").read_text())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in QUICK else pytest.mark.full) for name in NAMES]
)
def test_run_finds_what_the_page_shows(job: Job, tmp_path: Path, name: str) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    job.run(sys.executable, "bench/all.py", name, "--short", "--results", str(results), "--out", str(page))
    (file,) = results.glob("*.json")
    run = json.loads(file.read_text())["runs"][name]
    assert not run["failed"]
    assert run["tables"]
    assert all(table["rows"] for table in run["tables"])
    titles = [table["title"] for table in run["tables"]]
    assert all(f"{title}:" in page.read_text() for title in titles)


@pytest.mark.ranks
def test_a_run_ends_with_make_bench_when_that_alone_is_interrupted(job: Job, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "bench/all.py",
        "planner",
        "--results",
        str(tmp_path),
        "--out",
        str(tmp_path / "page.md"),
    ]
    whole = job.start(*command)
    assert whole.stdout is not None
    assert any("planner" in line for line in whole.stdout)
    (run,) = children(whole.pid)
    whole.send_signal(signal.SIGINT)
    whole.communicate(timeout=300)
    assert whole.returncode
    while Path(f"/proc/{run}").exists():  # it ends after whoever has started it
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that a process has started, as soon as there are any."""
    while True:
        found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
        if found:
            return list(map(int, found))
        time.sleep(0.1)
