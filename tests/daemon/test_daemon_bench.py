"""bench/daemon.py: it prints what docs/benchmarks.md shows, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--clients", "1", "2", "--lookups", "20", "--entries", "20", "300", "--deployments", "5", "--starts", "2")


def test_table_is_the_one_of_the_page(daemon_home) -> None:
    folder = daemon_home.base / "tmp"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "bench/daemon.py", *TINY],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["median", "p99", "per", "second", "goal"]
    names = [re.split(r"  +", line)[0] for line in rows]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    section = page[page.index("## Daemon (`bench/daemon.py`") :].split("\n## ")[0]
    shown = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]

    def wordings(rows: list[str]) -> set[str]:
        return {re.sub(r"[\d,]+ (?=client|now|entries|deploy)", "", name).replace("clients", "client") for name in rows}

    assert wordings(names) <= {*wordings(shown), "---"}
    median = {name: float(re.search(r"(\d+\.\d+) M?[mi]", line)[1]) for name, line in zip(names, rows, strict=True)}  # type: ignore[index]
    assert median["look-up, 2 clients in turn"] > 0
    assert 5 < median["memory of the daemon, 300 entries"] < 60
    assert median["start to first answer"] > median["python -I -S -c pass"]
    assert list(folder.iterdir()) == []
    assert daemon_home.pids() == []
