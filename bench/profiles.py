"""Plans GPT-2 anew many times, beside processes that come and go, and measures the plans on an idle machine.

    python bench/profiles.py [--runs 10] [--busy 2] [--steps 8] [--rounds 3]

Each run is a job of two ranks with two stages and eight microbatches that measures all parts, without a cache. Busy
processes compute in memory of 64 MB for up to 1.5 s, and pause for up to a second, at random. Afterwards they end, and
each different cut trains in turns.

cut       operators of the first stage; in brackets how many runs found it
step      median of the steps, of the slower rank; and relative to the quickest cut's, of those that runs have found
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from _busy import busy
from _results import Spread, Table, found

PLAN = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "8", "RANNC_CACHE": "off", "OMP_NUM_THREADS": "1"}
WIDTH, LAYERS, WORDS, LENGTH, ROWS = 256, 6, 8192, 128, 16
"""Of GPT-2, and of a rank's mini-batch."""
NEAR = 1.02
"""How much longer than the quickest a step may take that counts as good."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 10), ("busy", 2), ("steps", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        train(options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        cuts: dict[int, list[Path]] = defaultdict(list)
        runs = Table(
            f"Plans made beside {options.busy} processes that come and go", "run", "operators of the first stage",
            "predicted stages, ms",
        )  # fmt: skip
        with busy(options.busy):
            for number in range(options.runs):
                file = Path(folder) / str(number)
                told = job(1, SAVE_DEPLOYMENT="true", DEPLOYMENT_FILE=str(file))
                cuts[told["operators"]].append(file)
                stages = ", ".join(f"{1e-3 * us:.1f}" for us in told["stages_us"])
                runs.row(number, told["operators"], stages)
        times: dict[int, list[float]] = defaultdict(list)
        for number in range(options.rounds):
            for cut, files in sorted(cuts.items(), reverse=bool(number % 2)):
                times[cut] += job(options.steps, LOAD_DEPLOYMENT="true", DEPLOYMENT_FILE=str(files[0]))["steps_s"]
    medians = {cut: statistics.median(each) for cut, each in times.items()}
    best = min(medians.values())
    table = Table(
        "Their steps, alone", "operators of the first stage", "runs", ("step", "{:.1f} ms"), "step / the quickest's"
    )
    for cut, files in sorted(cuts.items()):
        table.row(cut, len(files), Spread.of(times[cut], 1e3), medians[cut] / best)
    good = sum(len(files) for cut, files in cuts.items() if medians[cut] <= NEAR * best)
    found("profiles-cut", good / options.runs, f"{good} of {options.runs}, two stages of GPT-2")


def job(steps: int, **items: str) -> dict[str, Any]:
    """Run a job of two ranks; returns what the first one tells."""
    runner = Path(sysconfig.get_path("scripts")) / "rannc-run"
    variables = {**PLAN, "RANNC_LOG_LEVEL": "warn", **{f"RANNC_{name}": value for name, value in items.items()}}
    command = [str(runner), "-np", "2", "--show-ranks", "0", __file__, "--steps", str(steps)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not told:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    first: dict[str, Any] = json.loads(told[-1])
    return first


def train(steps: int) -> None:
    """Train for some steps, on a rank."""
    import torch
    import torch.distributed as dist
    from _estimated_models import Gpt

    import pyrannc

    rank = pyrannc.get_rank()
    torch.manual_seed(0)
    model = Gpt(WIDTH, LAYERS, WORDS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))
    times = []
    for _ in range(steps):
        pyrannc.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        wrapped(tokens).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    slower = torch.tensor(times[1:], dtype=torch.float64)  # the first one allocates
    if len(slower):
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    if rank == 0:
        stages = [stage.estimate for stage in wrapped.deployment.stages]
        told = {
            "operators": len(wrapped.deployment.stages[0].ops),
            "stages_us": [each.forward_us + each.backward_us for each in stages],
            "steps_s": slower.tolist(),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
