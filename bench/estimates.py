"""Compares the planner's estimates of a step with measurements: time and memory of many plans, two ranks on two cores.

    python bench/estimates.py [--rounds 6] [--steps 3] [--only TEXT] [--memory | --calibrate] [--busy 0]

Linear layers (examples/tutorial.py), the convolutions of examples/digits.py and GPT-2 in two sizes each, with data
parallelism and with two stages, 1 to 8 microbatches, 1F1B and GPipe, with and without recomputing. All are wrapped
in one job and measured in turns, several steps of each per round; the first round is dropped. A step is the forward
call and backward, without the optimizer's step: the slowest rank's time, starting from a barrier. Nothing in the
planner is fitted to such steps; it uses only its measurements of blocks and links, made when each model was wrapped.
With --calibrate a first job runs every other plan with a cache of its own and learns from its steps, and a second job
predicts and runs the others, from which nothing was learned. --busy lets so many processes come and go meanwhile:
steps take longer beside them than they were predicted to take by themselves. With --calibrate the second job runs its
steps again when they have ended: a prediction is judged by those, too.

Where the machine's own speed changes meanwhile, predictions are of another machine: a fixed matrix product tells.

time      median of the steps / prediction; half of the distance of the quartiles, relative to the median
memory    most bytes of tensors in a step and the optimizer's / planned bytes, of the rank where this is largest, with
          gradients that are kept (zero_grad(set_to_none=False), which the plan is for), and without (zero_grad());
          the call's arguments and message buffers count
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _busy import busy
from _results import Spread, Table, found, note
from _starting import home
from _tensor_bytes import buffer_bytes, lying_and_peak

RANKS = 2
HALF = "BENCH_ESTIMATES_HALF"
"""Variable of the ranks: 0 or 1, of every two plans the one that is run; unset: all."""
BUSY = "BENCH_ESTIMATES_BUSY"
"""Variable of the ranks: processes that come and go beside them."""
AFTER = 20
"""Steps after which a job learns, if it has as many: the default (`calibrate_after`)."""
ALONE = "BENCH_ESTIMATES_ALONE"
"""Variable of the ranks: file that they make when no other processes are wanted any more."""
PLAIN = {"RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1", "RANNC_CACHE": "off"}
PLANS: dict[str, dict[str, str]] = {
    "data parallel": {"PARTITION_NUM": "1", "PIPELINE_NUM": "1"},
    "data parallel, m 4": {"PARTITION_NUM": "1", "PIPELINE_NUM": "4"},
    "2 stages, m 1": {"PARTITION_NUM": "2", "PIPELINE_NUM": "1"},
    "2 stages, m 4": {"PARTITION_NUM": "2", "PIPELINE_NUM": "4"},
    "2 stages, m 8": {"PARTITION_NUM": "2", "PIPELINE_NUM": "8"},
    "2 stages, m 4, GPipe": {"PARTITION_NUM": "2", "PIPELINE_NUM": "4", "SCHEDULE": "gpipe"},
    "2 stages, m 8, GPipe": {"PARTITION_NUM": "2", "PIPELINE_NUM": "8", "SCHEDULE": "gpipe"},
    "2 stages, m 4, recompute": {"PARTITION_NUM": "2", "PIPELINE_NUM": "4", "CHECKPOINTING": "true"},
}


@dataclass
class Configuration:
    """A wrapped model with a given plan."""

    name: str
    step: Callable[..., Any]
    predicted_us: float
    wrapped: Any
    optimizer: Any
    arguments: int
    """Bytes of the arguments of a call."""
    times: list[float] = field(default_factory=list)

    def memory(self) -> tuple[float, float]:
        """Most bytes of tensors in a step of this rank / planned bytes: with gradients that are kept, and without."""
        from rannd.plan.slot_memory import slot_bytes

        there = self.arguments + buffer_bytes(self.wrapped)
        self.step()
        kept = max(
            lying_and_peak(step, self.wrapped, self.optimizer, kept=True)[1]
            for step in (partial(self.step, kept=True), self.optimizer.step)
        )
        _, none = lying_and_peak(self.step, self.wrapped, self.optimizer)
        planned = slot_bytes(self.wrapped.deployment, self.wrapped._session.world.slot)
        return (kept + there) / planned, (none + there) / planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps of each configuration in a round")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--memory", action="store_true", help="measure no times")
    parser.add_argument("--calibrate", action="store_true", help="plans that nothing was learned from, after others")
    parser.add_argument("--busy", type=int, default=0, help="processes that come and go beside all of it")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        measure(options.rounds, options.steps, options.only, timed=not options.memory)
        return
    runner = Path(sysconfig.get_path("scripts")) / "rannc-run"
    command = [str(runner), "-np", str(RANKS), "--show-ranks", "0", __file__, *sys.argv[1:]]
    if not options.calibrate:
        with busy(options.busy):
            variables = {**os.environ, **PLAIN, BUSY: str(options.busy)}
            sys.exit(subprocess.run(command, env=variables, check=False).returncode)
    with home() as environment, tempfile.TemporaryDirectory() as folder:
        after = min(AFTER, (options.rounds + 1) * (options.steps + 1) - 2)  # a round has a step of warm-up
        for half in "01":
            cached = {BUSY: str(options.busy), "RANNC_CACHE": "on", "RANNC_CALIBRATE_AFTER": str(after), HALF: half}
            alone = Path(folder) / "alone"
            if half == "1" and options.busy:
                cached[ALONE] = str(alone)
            with subprocess.Popen(command, env={**environment, **PLAIN, **cached}) as job, busy(options.busy):
                while job.poll() is None and not alone.exists():
                    time.sleep(0.1)
            if job.returncode:
                sys.exit(job.returncode)


def measure(rounds: int, steps: int, only: str, *, timed: bool) -> None:
    import torch
    import torch.distributed as dist
    from _estimated_models import CPU, models

    import pyrannc

    rank = pyrannc.get_rank()
    made: list[Configuration] = []
    paces: dict[str, list[float]] = {"when plans were made": [], "between steps": []}
    for model_name, make, arguments, whole in models(CPU):
        for number, (plan_name, plan) in enumerate(PLANS.items()):
            name = f"{model_name}, {plan_name}"
            if os.environ.get(HALF, str(number % 2)) != str(number % 2):
                continue
            if only not in name or (whole and plan["PIPELINE_NUM"] != "1"):
                continue
            for key in {key for each in PLANS.values() for key in each}:
                os.environ.pop(f"RANNC_{key}", None)
            os.environ.update({f"RANNC_{key}": value for key, value in plan.items()})
            torch.manual_seed(0)
            inner = make()
            optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-5)
            wrapped = pyrannc.RaNNCModule(inner, optimizer)

            def step(
                wrapped: Any = wrapped,
                optimizer: Any = optimizer,
                arguments: tuple[Any, ...] = arguments,
                *,
                kept: bool = False,
            ) -> None:
                optimizer.zero_grad(set_to_none=not kept)
                wrapped(*arguments).backward()

            paces["when plans were made"].append(pace())
            step()
            optimizer.step()
            given = sum(argument.nbytes for argument in arguments)
            made.append(Configuration(name, step, wrapped.deployment.step_us, wrapped, optimizer, given))
            if rank == 0:
                print(f"\rwrapped {len(made)}", end="", file=sys.stderr, flush=True)

    def slowest() -> list[list[float]]:
        """Times of the slowest rank, of all configurations in turns."""
        for each in made:
            each.times.clear()
        for number in range(rounds + 1):
            paces["between steps"].append(pace())
            for each in made[:: 1 if number % 2 else -1]:
                each.step()  # warm-up, because caches hold data of other configurations
                for _ in range(steps):
                    pyrannc.barrier()
                    start = time.perf_counter()
                    each.step()
                    if number:
                        each.times.append(time.perf_counter() - start)
        times = torch.tensor([each.times for each in made], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        found: list[list[float]] = times.tolist()
        return found

    times = slowest() if timed else []
    alone = []
    if timed and (wanted := os.environ.get(ALONE)):
        Path(wanted).touch()
        time.sleep(1)  # until they have ended
        alone = slowest()
    memory = torch.tensor([each.memory() for each in made], dtype=torch.float64)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    if rank == 0:
        half = {"0": "plans that are learned from", "1": "plans that nothing was learned from"}
        kind = half.get(os.environ.get(HALF, ""), "first plans")
        beside = f", beside {count} processes that come and go" if (count := os.environ.get(BUSY, "0")) != "0" else ""
        plan = made[-1].wrapped.deployment
        note(
            f"{kind}{beside}: the runtime takes {plan.call_us:.0f} us for a call, and {plan.host_us:.0f} us of the "
            f"host for each computation and message"
        )
        if timed:
            told = (f"{1e3 * statistics.median(values):.2f} ms {when}" for when, values in paces.items())
            note(f"{kind}{beside}: a fixed matrix product took {' and '.join(told)}")
            show_times(f"{kind}{beside}", made, times, judged=kind.startswith("plans that nothing"))
            if alone:
                show_times(f"{kind}{beside}, whose steps run when these have ended", made, alone, judged=True)
        show_memory(f"{kind}{beside}", made, memory.tolist())


def pace() -> float:
    """Seconds of a fixed matrix product, the least of five: whether the machine is as fast as it was before."""
    import torch

    square = torch.ones(512, 512)
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        torch.mm(square, square)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def show_times(what: str, made: list[Configuration], times: list[list[float]], *, judged: bool) -> None:
    """Print the table of times; goals are those of plans that nothing was learned from, after learning."""
    errors, limits = [], []
    table = Table(
        f"Time of steps, {what}", "plan", ("predicted", "{:.2f} ms"), ("measured", "{:.2f} ms"),
        "measured / predicted", ("half of the quartiles' distance", "{:.3f}"),
    )  # fmt: skip
    for each, taken in zip(made, times, strict=True):
        low, middle, high = statistics.quantiles(taken, n=4)
        ratio, noise = 1e6 * middle / each.predicted_us, (high - low) / 2 / middle
        errors.append(abs(1 / ratio - 1))
        limits.append(errors[-1] / max(0.1, 2 * noise))
        table.row(each.name, each.predicted_us / 1e3, Spread.of(taken, 1e3), ratio, noise)
    median = statistics.median(errors)
    late, late_of_limit = (sorted(each)[int(0.95 * (len(each) - 1))] for each in (errors, limits))
    sums = Table(
        f"Error of the prediction, {what}", "plans", ("median", "{:.1%}"), ("95th percentile", "{:.1%}"),
        "beyond both 10 % and twice the spread of their steps",
    )  # fmt: skip
    sums.row(len(errors), median, late, sum(each > 1 for each in limits))
    if judged:
        found("estimate-median", median, what)
        found("estimate-p95", late, what)
        found("estimate-noise", late_of_limit, what)


def show_memory(what: str, made: list[Configuration], memory: list[tuple[float, float]]) -> None:
    """Print the table of memory; goals are those of gradients that are kept."""
    table = Table(f"Memory, used / planned, {what}", "plan", "gradients kept", "gradients dropped")
    for each, (kept, none) in zip(made, memory, strict=True):
        table.row(each.name, kept, none)
    kept_all, none_all = zip(*memory, strict=True)
    off = statistics.median(abs(1 / part - 1) for part in kept_all)
    found("estimate-memory", off, what)
    found("estimate-memory-most", max(kept_all), what)
    off = statistics.median(abs(1 / part - 1) for part in none_all)
    note(f"gradients dropped: median error {off:.1%}, used / planned {min(none_all):.3f} to {max(none_all):.3f}")


if __name__ == "__main__":
    main()
