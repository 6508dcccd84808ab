"""Promises that tests keep: runs those that count cases, and tells how many fail.

    python bench/tested.py [exhaustive mutations gradients] [--few | --whole]

exhaustive  the planner compared with a search of all plans, 1,000 random instances (tests/plan/search/test_stages.py)
mutations   10,000 changed models and calls, none of which has the fingerprint or the graph hash of another; of many
            that miss a key at once, one makes it (tests/graph/fingerprint, tests/daemon/client/test_single_flight.py)
gradients   every kind of plan compared with one process that emulates the ranks, in float64, to 1e-9 (tests/parity):
            the tests of CI; with --whole each plan of each model, which takes more than an hour

With --few only those that `make test` runs as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _results import Table, found

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "exhaustive": ("planner-exhaustive", ["tests/plan/search/test_stages.py"]),
    "mutations": (
        "mutations",
        ["tests/graph/fingerprint/test_fingerprint_mutants.py", "tests/daemon/client/test_single_flight.py"],
    ),
    "gradients": ("gradients", ["tests/parity"]),
}
"""By name: the goal, and the tests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*TESTS, []], help="promises (default: all)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--few", action="store_true")
    amount.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    table = Table("Tests", "what", "tests", "passed", "skipped", "failed", ("time of one worker", "{:.0f} s"))
    for name in options.what or TESTS:
        goal, paths = TESTS[name]
        of_ci = "not full" if name == "gradients" and not options.whole else ""
        cases, skipped, failed, seconds = run(paths, "not long and not full" if options.few else of_ci)
        table.row(name, cases, cases - skipped - failed, skipped, failed, seconds)
        found(goal, failed, f"{cases - skipped} tests")


def run(paths: list[str], marks: str) -> tuple[int, int, int, float]:
    """Run tests with these marks; returns how many there are, were skipped and failed, and seconds.

    Exits this process if none ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", f"--junitxml={report}"]
        command += [*paths, "-m", marks]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
        if done.returncode:
            print(done.stdout, file=sys.stderr)

    def total(name: str) -> float:
        return sum(float(suite.get(name, 0)) for suite in suites)

    return int(total("tests")), int(total("skipped")), int(total("failures") + total("errors")), total("time")


if __name__ == "__main__":
    main()
