"""Compares steps of ranks that are bound to their share of the cores, as rannc-run binds them, with ranks that are not.

    python bench/binding.py [--rounds 8] [--steps 5]

Two ranks of one thread each. Each model is trained in one job, with all threads of both ranks bound in every other
round: the models, the plans and the memory are the same. The first step of each round is dropped.

bound, free   the slower rank's steps
ratio         free / bound
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from _results import Spread, Table, note
from _starting import RANNC_RUN, home

PLANS = {"data parallel": ("1", "1"), "2 stages, m 4": ("2", "4"), "2 stages, m 8": ("2", "8")}
"""Stages and microbatches."""
MODELS = ("linear 512 x 8", "GPT-2 128 x 4")
PLAIN = {"RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1", "RANNC_CACHE": "off", "RANNC_SCHEDULE": "1f1b"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of each kind")
    parser.add_argument("--steps", type=int, default=5, help="measured in a round")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        measure(options.rounds, options.steps)
        return
    if len(os.sched_getaffinity(0)) < 2:
        note("there is only one core: nothing to compare")
        return
    with home() as environment:
        command = [*RANNC_RUN, "--show-ranks", "0", __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**environment, **PLAIN}, check=False).returncode)


def measure(rounds: int, steps: int) -> None:
    """Print a line for each model and plan; on all ranks."""
    from _estimated_models import CPU, models

    from rannd.ranks.core_share import BEFORE_VARIABLE

    own = os.sched_getaffinity(0)
    before = os.environ.get(BEFORE_VARIABLE)
    if before is None:
        note("rannc-run does not bind ranks here (docs/launching.md): nothing to compare")
        return
    every = {int(core) for core in before.split(",")}
    table = Table(
        f"Steps of two ranks that are bound to cores and that are not, {rounds} rounds each", "model", "plan",
        ("bound", "{:.2f} ms"), ("free", "{:.2f} ms"), "free / bound",
    )  # fmt: skip
    for name, make, arguments, _ in models(CPU):
        for plan, (stages, pieces) in PLANS.items() if name in MODELS else ():
            os.environ.update(RANNC_PARTITION_NUM=stages, RANNC_PIPELINE_NUM=pieces)
            step = training(make, arguments)
            times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(2 * rounds):
                bound = bool(number % 2)
                place(own if bound else every)
                times[bound] += [slower(step) for _ in range(steps + 1)][1:]
            place(own)
            tight, free = (Spread.of(times[bound], 1e3) for bound in (True, False))
            table.row(name, plan, tight, free, free.median / tight.median)


def training(make: Callable[[], Any], arguments: Iterable[Any]) -> Callable[[], None]:
    """A step of a new model."""
    import torch

    import pyrannc

    torch.manual_seed(0)
    inner = make()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-5)
    model = pyrannc.RaNNCModule(inner, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(*arguments).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def place(cores: Iterable[int]) -> None:
    """Let all threads of this process run on these cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def slower(step: Callable[[], None]) -> float:
    """Seconds of a step, of the slower rank."""
    import torch
    import torch.distributed as dist

    import pyrannc

    pyrannc.barrier()
    begun = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
