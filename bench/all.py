"""Runs the measurements of bench/, and writes bench/results/<date>.json and docs/benchmarks.md (`make bench`).

    python bench/all.py [NAME ...] [--short] [--list] [--page] [--results FOLDER] [--out FILE]

NAME     only these runs (--list shows all); the others keep the results that they have
--short  the smallest sizes: shows that everything runs, not how fast it is
--page   runs nothing, only writes the page anew from the files of results

Each run is a script of bench/, in a process of its own, which can also be started alone: then it prints the same tables
and nothing is written. Results are written after each run: one that is interrupted loses that one alone. A run that
fails is told in the file and on the page, and the others go on; the exit code is 1 at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import _page
from _machine import machine, speed, versions
from _results import KEPT

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
SAID = 2000
"""Characters of the output of a run that failed."""


@dataclass(frozen=True)
class Run:
    """A script and its arguments."""

    name: str
    title: str
    script: str
    given: str = ""
    short: str = ""
    """Arguments of the smallest form, in place of `given`."""


_GPT = "--layers 1 --width 64 --words 512 --length 32 --rows 2"
RUNS = (
    Run("planner", "Planner", "planner.py", "", "times blocks regret moved --repeats 1"),
    Run("value", "Value of plans", "planner.py", "value", "value --models 2"),
    Run("subgraphs", "Measurements before the first plan", "planner.py", "subgraphs", "subgraphs"),
    Run("simulator", "Simulator", "simulator.py"),
    Run("page", "Page of a plan", "page.py", "", "--repeats 1"),
    Run("daemon", "Daemon", "daemon.py", "", "--lookups 20 --entries 20 300 --deployments 5 --starts 2"),
    Run("startup", "Start of a job", "startup.py", "--repeats 7", "--repeats 1 --layers 1 --width 64"),
    Run("runtime", "Runtime", "runtime.py", "", "--rounds 1 --steps 1"),
    Run("zero", "Memory and ZeRO", "memory.py", "", f"bytes throughput offload --rounds 1 --steps 1 --ranks 2 {_GPT}"),
    Run(
        "estimates", "Estimates", "estimates.py", "--calibrate --rounds 6 --steps 3",
        "--calibrate --rounds 1 --steps 3 --only 512",
    ),
    Run(
        "busy-estimates", "Estimates beside busy processes", "estimates.py",
        "--calibrate --rounds 6 --steps 3 --busy 2", "--calibrate --rounds 1 --steps 3 --only 512 --busy 1",
    ),
    Run("profiles", "Profiles beside busy processes", "profiles.py", "", "--runs 1 --steps 2 --rounds 1"),
    Run("peers", "Steps beside others' packages", "peers.py", "steps",
        "steps --small --rounds 1 --steps 1 --workloads tutorial"),
    Run("jobs", "Whole jobs beside others' packages", "peers.py", "jobs", "jobs --steps 3"),
    Run("frameworks", "Frameworks", "frameworks.py", "", "--rounds 1 --steps 4"),
    Run("binding", "Ranks that are bound to cores", "binding.py", "", "--rounds 1 --steps 1"),
    Run("compile", "Compiled blocks", "compile.py", "--layers 4 --steps 13", "--layers 1 --width 64 --steps 5"),
    Run("elastic", "Elastic jobs, simulated", "elastic.py", "simulate", "simulate --hosts 32 --seeds 1 --hours 2"),
    Run("changes", "Changes of an elastic job", "elastic.py", "changes --warm 20",
        "changes --layers 2 --width 64 --words 64 --length 8 --steps 2"),
    Run("saving", "Saving of an elastic job", "elastic.py", "costs --rounds 1 --warm 20",
        "costs --rounds 1 --layers 2 --width 64 --words 64 --length 8 --steps 2"),
    Run("graph", "Tracing", "graph.py", "", "--layers 2 --rounds 1 --no-large"),
    Run("coverage", "Coverage", "coverage.py", "", "gpt2 llama"),
    Run("analytic", "Times by formula", "analytic.py", "", "--layers 2 --width 64 --sequence 32 --rounds 1"),
    Run("paper", "The paper's setting, simulated", "paper.py", "", "bert --hidden 1024 --layers 24"),
    Run("paper-half", "The paper's setting with float16, simulated", "paper.py",
        "bert --half --hidden 2048 --layers 24 96 256", "bert --half --hidden 1024 --layers 24"),
    Run("interleaving", "Several stages on a slot, simulated", "interleaving.py", "paper --models 1024",
        "zoo --models gpt2"),
    Run("tested", "Promises that tests keep", "tested.py", "", "exhaustive --few"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [run.name for run in RUNS]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names, []], help=", ".join(names))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--results", type=Path, default=BENCH / "results", help="folder of the files of results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page")
    options = parser.parse_args()
    if options.list:
        for run in RUNS:
            print(f"{run.name:16s} python bench/{run.script} {run.given}")
        return
    wanted = [] if options.page else [run for run in RUNS if not options.names or run.name in options.names]
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{datetime.now(UTC):%Y-%m-%d}.json"
    failed = []
    for number, run in enumerate(wanted, 1):
        given = (run.short if options.short and run.short else run.given).split()
        print(f"\n== {number} of {len(wanted)}: {run.name}: python bench/{run.script} {' '.join(given)}", flush=True)
        told = measured(run, given)
        keep(file, run.name, told)
        print(f"== {run.name}: {'FAILED' if told['failed'] else 'done'} in {told['seconds']:.0f} s", flush=True)
        if told["failed"]:
            failed.append(run.name)
    text = _page.page(_page.newest(options.results), {run.name: (run.title, run.script) for run in RUNS})
    _page.write(options.out, text)
    print(f"\nwritten: {options.out}" + (f", {file}" if wanted else ""))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def measured(run: Run, given: Sequence[str]) -> dict[str, Any]:
    """Run a script, and return what it has found, as it stands in the file of results."""
    with tempfile.TemporaryDirectory() as folder:
        kept, log = Path(folder) / "kept", Path(folder) / "log"
        kept.touch()
        begun, before, load = time.time(), speed(), os.getloadavg()[0]
        command = [sys.executable, str(BENCH / run.script), *given]
        with (
            log.open("wb") as file,
            subprocess.Popen(
                command, env={**os.environ, KEPT: str(kept)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, process_group=0,
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    file.write(line)
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
            except BaseException:  # whoever was interrupted alone ends what it has started
                os.killpg(process.pid, signal.SIGINT)
                raise
        failed = ""
        if process.returncode:
            failed = f"exit code {process.returncode}: {log.read_text(errors='replace')[-SAID:]}"
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
    return {
        "script": run.script,
        "arguments": list(given),
        "begun": f"{datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": round(time.time() - begun, 1),
        "load": round(load, 2),
        "loop_s": [round(before, 3), round(speed(), 3)],
        "commit": _commit(),
        "machine": machine(),
        "versions": versions(),
        "failed": failed,
        **_page.grouped(lines),
    }


def keep(file: Path, name: str, told: dict[str, Any]) -> None:
    """Write a run into the file of results, in place of an older one of the same name."""
    before = json.loads(file.read_text()) if file.exists() else {}
    runs = {**before.get("runs", {}), name: told}
    order = {run.name: number for number, run in enumerate(RUNS)}
    runs = dict(sorted(runs.items(), key=lambda item: order.get(item[0], len(order))))
    _page.write(file, json.dumps({"goals": _page.verdicts(runs), "runs": runs}, indent=1) + "\n")


def _commit() -> str:
    """The commit of the checkout, with a + if files differ from it, beside those that this script writes."""
    git = ["git", "-C", str(ROOT)]
    head, changed = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=False).stdout.strip()
        for command in (
            ["rev-parse", "--short", "HEAD"],
            ["status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!docs/benchmarks.md"],
        )
    )
    return f"{head}{'+' if changed else ''}" if head else "unknown"


if __name__ == "__main__":
    main()
