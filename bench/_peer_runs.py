"""Jobs of bench/peers.py: how they are started and measured, and the comparison of whole jobs."""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _results import Spread, Table, found, note
from _starting import RANNC_RUN, TORCHRUN, home

HERE = Path(__file__).resolve().parent
DEEPSPEED = HERE.parent / ".peers"
"""Where `make peers` puts DeepSpeed: outside of the environment, see bench/peers.py."""
DEEPSPEED_VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(DEEPSPEED), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "DS_ACCELERATOR": "cpu",
}
SIZES = {"ROWS": 8, "LENGTH": 128, "WORDS": 8192, "WIDTH": 256, "LAYERS": 6}
SMALL = {"ROWS": 2, "LENGTH": 16, "WORDS": 128, "WIDTH": 32, "LAYERS": 2}
NEAR = 1e-3
"""Of the last losses, relative."""
LONGEST_S = 900
"""Of a job: one that takes longer hangs."""


@dataclass(frozen=True)
class Job:
    """A way to start a script of bench/_peer_jobs."""

    told: str
    launcher: Sequence[str]
    script: str

    @property
    def command(self) -> list[str]:
        return [*self.launcher, str(self.path)]

    @property
    def path(self) -> Path:
        return HERE / "_peer_jobs" / f"train_{self.script}.py"


JOBS = {
    "rannd": Job("rannc-run", RANNC_RUN, "rannd"),
    "ddp": Job("torchrun, DistributedDataParallel", TORCHRUN, "ddp"),
    "fsdp2": Job("torchrun, FSDP2", TORCHRUN, "fsdp2"),
    "1f1b": Job("torchrun, torch 1F1B", TORCHRUN, "1f1b"),
    "accelerate": Job("torchrun, accelerate", TORCHRUN, "accelerate"),
    "deepspeed": Job("torchrun, DeepSpeed ZeRO 1", TORCHRUN, "deepspeed"),
}
PLAIN = Job("python, one process", [sys.executable], "plain")


@dataclass(frozen=True)
class Measured:
    """Of a job. Times are seconds."""

    first: float
    """From the command to the end of the first step, of the later rank, as are the other times."""
    wrap: float
    """From the model with its values to the end of the first step."""
    others: float
    """From the end of the first step to that of the last one."""
    step: float
    """Median of the other steps."""
    memory: float
    """MiB of the rank that has most."""
    loss: float
    """Of the last step, mean over the ranks that know it."""
    profiling: float
    """With rannd, if it measures anything; else 0."""


def ended(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[tuple[float, str]]]:
    """(exit code, lines of the output with the times when they came) of a job, which is ended after LONGEST_S."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        late = threading.Timer(LONGEST_S, started.send_signal, [signal.SIGTERM])  # launchers then end their ranks
        late.start()
        try:
            assert started.stdout is not None
            lines = [(time.time(), line) for line in started.stdout]
        finally:
            late.cancel()
    return started.returncode, lines


def run(job: Job, environment: Mapping[str, str]) -> Measured | str:
    """Run a job; the last lines that it printed where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        code, lines = ended(job.command, {**environment, "PEER_JOB_FOLDER": folder})
        told = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    if code or not told:
        return first_error([line for _, line in lines]) or f"exit code {code}"
    at = {word: when for when, line in lines for word in ("Running profiler", "Profiling finished") if word in line}
    ends = [max(each) for each in zip(*(one["ends"] for one in told), strict=True)]
    return Measured(
        first=ends[0] - begun,
        wrap=max(one["ends"][0] - one["built"] for one in told),
        others=ends[-1] - ends[0],
        step=statistics.median(after - before for before, after in itertools.pairwise(ends)),
        memory=max(one["memory"] for one in told) / 2**10,
        loss=statistics.fmean(one["loss"] for one in told if one["loss"] is not None),
        profiling=at["Profiling finished"] - at["Running profiler"] if len(at) == 2 else 0.0,
    )


def first_error(lines: Sequence[str]) -> str:
    """The first line of the first error that a job printed."""
    named = [line.strip() for line in lines if "Error: " in line]
    return (named or [""])[0]


def lines_changed(script: Path, plain: Path) -> int:
    """Lines of `plain` that `script` has otherwise, or not, or more of; without comments, docstrings, and layout."""

    def lines(path: Path) -> list[str]:
        tree = ast.parse(path.read_text())
        tree.body = tree.body[1:]  # the docstring
        return ast.unparse(tree).split("\n")

    before, after = ([line for line in lines(path) if line] for path in (plain, script))
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def compare_jobs(names: Sequence[str], steps: int, repeats: int, small: bool) -> bool:
    """Whether all jobs of rannd ended with the losses of one process."""
    sizes = {**(SMALL if small else SIZES), "STEPS": steps}
    names = [name for name in names if name != "deepspeed" or DEEPSPEED.is_dir()]
    if not DEEPSPEED.is_dir():
        note(f"DeepSpeed is left out: {DEEPSPEED} is not there, `make peers` makes it")
    jobs = {"plain": PLAIN, **{name: JOBS[name] for name in names}}
    results: dict[str, list[Measured | str]] = {}
    table = Table(
        f"GPT-2, whole jobs of two ranks, {repeats} of each, {steps} steps", "job", ("first step", "{:.2f} s"),
        ("all steps", "{:.2f} s"), ("median step", "{:.1f} ms"), ("memory", "{:.0f} MiB"), "lines", "error",
    )  # fmt: skip
    for _ in range(repeats):
        with home() as environment:  # with an empty cache
            environment |= {f"PEER_JOB_{name}": str(value) for name, value in sizes.items()}
            for name, job in jobs.items():
                variables = {**environment, **(DEEPSPEED_VARIABLES if name == "deepspeed" else {})}
                if name == "rannd":
                    # At this level it tells when it begins and ends to measure.
                    results.setdefault("rannd, cold", []).append(run(job, {**variables, "RANNC_LOG_LEVEL": "debug"}))
                    results.setdefault("rannd, repeated", []).append(run(job, variables))
                else:
                    results.setdefault(name, []).append(run(job, variables))
    return tell(table, jobs, results)


def tell(table: Table, jobs: Mapping[str, Job], results: Mapping[str, Sequence[Measured | str]]) -> bool:
    """Print the rows and the goals."""
    right = True
    (loss, *_) = [each.loss for each in results["plain"] if isinstance(each, Measured)] or [float("nan")]
    for name, each in results.items():
        job = jobs[name.partition(",")[0]]
        told = job.told + (name.removeprefix("rannd") if job.script == "rannd" else "")
        good = [one for one in each if isinstance(one, Measured)]
        errors = [one for one in each if isinstance(one, str)]
        wrong = [one.loss for one in good if not abs(one.loss / loss - 1) <= NEAR]
        if wrong:
            errors.append(f"last loss {wrong[0]:.4f}, of one process {loss:.4f}")
        right &= job.script != "rannd" or not errors
        changed = lines_changed(job.path, PLAIN.path)
        if not good:
            table.row(told, None, None, None, None, changed, errors[0])
            continue
        first, others, step, memory = (
            Spread.of([getattr(one, what) for one in good], 1e3 if what == "step" else 1)
            for what in ("first", "others", "step", "memory")
        )
        table.row(told, first, others, step, memory, changed, errors[0] if errors else None)
    cold, repeated = (
        [one for one in results.get(f"rannd, {when}", ()) if isinstance(one, Measured)] for when in ("cold", "repeated")
    )
    if cold and repeated:
        wraps = [statistics.median(one.wrap for one in each) for each in (cold, repeated)]
        found("repeat-wrap", wraps[1], f"a step of it takes {statistics.median(one.step for one in repeated):.2f} s")
        found("repeat-cold", wraps[1] / wraps[0])
        found("profiling-steps", statistics.median(one.profiling / one.step for one in cold))
    return right
