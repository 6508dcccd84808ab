"""What changes of a real elastic job cost on this machine, and what saving costs: parts of bench/elastic.py.

changes  A GPT of 100 million parameters (fp32, AdamW) on 4, 3 and 4 ranks of this machine, whose host file changes
         after --steps new steps, when the plan for the next hosts is there; then one rank is killed in mid-step. Each
         step is kept in memory (snapshots = neighbour).
         Of each start are printed in what time its plan was found, the seconds from the change to the end of the
         first new step, those of a usual step, the rest, torch's import in it, and how many steps were made twice or,
         after the kill, lost in progress. In the rest of a change is the step that the ranks finish before they leave.
costs    The same model on 2 ranks whose hosts stay. Steps without saving, with a checkpoint in the background every
         --every steps (4), with each step kept in memory (snapshots = neighbour), and with as many as by default
         (auto), each --rounds jobs, in turns. A job's first two steps do not count; the others are two whole periods of
         --every. Printed are the median step and the mean, which has the whole cost of a checkpoint in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from _elastic_training import Step
from _results import Spread, Table, found, note
from _starting import LONGEST_S, SCRIPTS, home

from rannd.config import Config

SCRIPT = str(Path(__file__).with_name("_elastic_training.py"))
RANKS = 4
PLANS_S = 300.0
"""Maximum seconds to wait for plans that are made in advance."""
WARM_UP = 2
"""Steps of a job that do not count."""


@dataclass
class Training:
    """One job in a folder."""

    folder: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    @property
    def steps(self) -> list[Step]:
        """Steps until now."""
        file = self.folder / "steps"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line) for line in whole]

    @property
    def log(self) -> str:
        """What the job has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, what: str, is_true: Callable[[], bool]) -> None:
        """Wait until something is true; exits this process if the job ends before."""
        deadline = time.monotonic() + LONGEST_S
        while not is_true():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the job has not come to {what}; it has printed:\n{self.log}")
            time.sleep(0.05)

    def wait_for_plans(self, least: int) -> None:
        """Wait until so many plans are in the cache, for a while: some cannot be made in advance."""
        command = [str(SCRIPTS / "rannc-cache"), "ls"]
        deadline = time.monotonic() + PLANS_S
        while time.monotonic() < deadline and self.process.poll() is None:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
            if done.stdout.count("deployment") >= least:
                return
            time.sleep(2.0)

    def host_file(self, slots: int) -> None:
        """Name so many slots of this machine."""
        new = self.folder / "hosts.new"
        new.write_text(f"localhost slots={slots}\n")
        new.replace(self.folder / "hosts")


@contextmanager
def training(
    folder: Path, environment: Mapping[str, str], given: argparse.Namespace, launch: list[str], *options: str
) -> Iterator[Training]:
    """Start a job, and end it."""
    folder.mkdir(exist_ok=True)
    sizes = [f"--{name}={getattr(given, name)}" for name in ("rows", "length", "layers", "width", "words")]
    command = [str(SCRIPTS / "rannc-run"), "--elastic", *launch, SCRIPT, str(folder), *sizes, *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**environment, "RANNC_LOG_LEVEL": "debug"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield Training(folder, environment, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def changes(given: argparse.Namespace) -> None:
    """Measure a job whose slots change, and one of whose ranks is killed."""
    with home() as variables, tempfile.TemporaryDirectory() as name:
        environment = {**variables, "RANNC_SNAPSHOTS": "neighbour"}
        folder = Path(name)
        (folder / "hosts").write_text(f"localhost slots={RANKS}\n")
        second = "{:.1f} s"
        table = Table(
            f"Starts of an elastic job, {_described(given)}", "start", ("plan found in", "{:.0f} ms"),
            ("to the end of the first new step", second), ("of it a usual step", second),
            ("import of torch, all ranks", second), ("the rest", second), "steps lost",
        )  # fmt: skip
        begun = time.time()
        with training(folder, environment, given, ["--hostfile", str(folder / "hosts")]) as job:
            _follow(table, job, f"{RANKS} ranks", begun, given.steps)
            job.wait_for_plans(2)  # the first of those in advance is for one slot fewer
            for slots in (RANKS - 1, RANKS):
                begun = time.time()
                job.host_file(slots)
                _follow(table, job, f"then {slots} ranks", begun, given.steps)
            time.sleep(job.steps[-1]["took_s"] / 2)
            begun = time.time()
            os.kill(int((folder / str(RANKS - 1)).read_text()), signal.SIGKILL)
            started = _follow(table, job, "kill -9 of a rank", begun, given.steps, in_progress=1)
    found("elastic-kill", started.took_s - started.import_s)
    found("elastic-lost", started.lost)
    if started.plan_ms is not None:
        found("elastic-plan", started.plan_ms)
    note(f"import of torch by one process: {_import_s():.1f} s")


@dataclass(frozen=True)
class Started:
    """What a start of a job has cost."""

    took_s: float
    """To the end of the first new step."""
    import_s: float
    lost: int
    """Steps."""
    plan_ms: float | None
    """None: a plan was made."""


def _follow(table: Table, job: Training, what: str, begun: float, steps: int, in_progress: int = 0) -> Started:
    """Wait for so many steps of the next start, and print what the change has cost."""
    old, said = {step["pid"] for step in job.steps}, len(job.log)

    def new() -> list[Step]:
        return [step for step in job.steps if step["pid"] not in old]

    job.wait(f"step {steps} of {what}", lambda: len(new()) >= max(steps, 2))
    told = re.search(r"Plan \w+ was found in (\S+) ms", job.log[said:])
    plan_ms = float(told[1]) if told else None
    first, *others = new()
    before = [step["step"] for step in job.steps if step["pid"] in old]
    lost = before[-1] + 1 - first["step"] + in_progress if before else 0
    usual_s = statistics.median(step["took_s"] for step in others)
    took_s, import_s = first["at"] - begun, first["import_s"]
    plan = "made anew" if plan_ms is None else plan_ms
    table.row(what, plan, took_s, usual_s, import_s, took_s - usual_s - import_s, lost)
    return Started(took_s, import_s, lost, plan_ms)


def costs(given: argparse.Namespace) -> None:
    """Compare steps of jobs that save with those of jobs that do not."""
    every = given.every or 4
    off = {"RANNC_SNAPSHOTS": "off"}
    plain, saves = "without saving", f"a checkpoint every {every} steps"
    kinds: dict[str, tuple[dict[str, str], list[str]]] = {plain: (off, []), saves: (off, [f"--every={every}"])}
    for mode in ("neighbour", "auto"):
        kinds[f"snapshots = {mode}"] = ({"RANNC_SNAPSHOTS": mode}, [])
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    end = WARM_UP + 2 * every
    with home() as environment:
        with tempfile.TemporaryDirectory() as name, training(Path(name), environment, given, ["-np", "2"]) as job:
            job.wait("a second step", lambda: len(job.steps) >= 2)
            job.wait_for_plans(3)  # for 2, 1 and 3 ranks: nothing is planned beside the steps that count
        for number in range(given.rounds):
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                variables, options = kinds[kind]
                with (
                    tempfile.TemporaryDirectory() as name,
                    training(
                        Path(name), {**environment, **variables}, given, ["-np", "2"], f"--end={end}", *options
                    ) as job,
                ):
                    job.wait(f"step {end}", lambda job=job: len(job.steps) >= end)
                    moments = [step["at"] for step in job.steps]
                times[kind] += [after - before for before, after in itertools.pairwise(moments[WARM_UP - 1 : end])]
    median, mean = statistics.median(times[plain]), statistics.mean(times[plain])
    table = Table(
        f"Steps that save, {given.rounds} jobs of each kind, {_described(given)}", "job", ("step", "{:.3f} s"),
        ("mean", "{:.3f} s"), ("median / that without saving", "{:.3f}"), ("mean / that without", "{:.3f}"),
    )  # fmt: skip
    for kind, values in times.items():
        middle, average = Spread.of(values), statistics.mean(values)
        ratios = (None, None) if kind == plain else (middle.median / median, average / mean)
        table.row(kind, middle, average, *ratios)
    each = (statistics.mean(times[saves]) - mean) * every
    default = Config().checkpoint_every
    found("elastic-saving", each / default / mean, f"a checkpoint, {each:.2f} s, every {default} steps")
    found("elastic-saving", statistics.median(times["snapshots = auto"]) / median - 1, "snapshots, the default")


def _import_s() -> float:
    """Seconds to import torch, the least of three processes."""
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True, timeout=LONGEST_S)
        took.append(time.perf_counter() - begun)
    return min(took)


def _described(given: argparse.Namespace) -> str:
    width = given.width
    size = (given.words + given.length + 2) * width + given.layers * (12 * width * width + 13 * width)
    return (
        f"{size / 1e6:.1f} million parameters, {given.layers} layers of width {width}, {given.rows} rows of "
        f"{given.length}, {os.cpu_count()} cores, torch {version('torch')}"
    )
