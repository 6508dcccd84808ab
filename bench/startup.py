"""Compares the start-up time of rannc-run with mpirun and torchrun: two ranks on this machine.

    python bench/startup.py [start first_step modules] [--repeats 9] [--layers 6] [--width 256]

Sides run one after the other, in an order that is reversed every other round, with temporary runtime and cache folders;
times are wall-clock seconds. "more" is the difference from the first side in the same round.

start       an empty script, from the command to its end: rannc-run compared with mpirun of the same Open MPI. The
            daemon is already running, or is started with the job, or is disabled
first_step  a GPT-2 (bench/_gpt2.py) from the command until both ranks have finished their first step: rannc-run with
            trace and deployment in the cache, compared with torchrun and DistributedDataParallel. "script" is when the
            later rank's script begins, "built" when it has its model and optimizer
modules     modules that should not be imported if everything comes from the cache, who imports them, and the time of
            their imports
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from _results import found, note
from _starting import MPIRUN, RANNC_RUN, TORCHRUN, end_daemon, gpt2, home, tell, timed

UNWANTED = (
    "torch._dynamo", "torch._inductor", "torch.export._trace", "torch.fx.experimental.proxy_tensor",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.testing", "triton", "mpi4py.MPI",
)  # fmt: skip
"""Modules that are needed for tracing, compiling and sharding, but not with a deployment from the cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["start", "first_step", "modules", []], help="all by default")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, after one warm-up round")
    parser.add_argument("--layers", type=int, default=6, help="layers of the GPT-2")
    parser.add_argument("--width", type=int, default=256, help="width of the GPT-2, a multiple of 4")
    options = parser.parse_args()
    size = ["--layers", str(options.layers), "--width", str(options.width)]
    for name in options.what or ("start", "first_step", "modules"):
        with home() as environment:
            if name == "start":
                start(environment, options.repeats)
            elif name == "first_step":
                first_step(environment, options.repeats, size)
            else:
                modules(environment, options.repeats, size)


def start(environment: Mapping[str, str], repeats: int) -> None:
    """Measure an empty script."""
    uncached = {**environment, "RANNC_CACHE": "off"}
    times: dict[str, list[float]] = {
        "mpirun": [], "rannc-run, daemon runs": [], "rannc-run, no cache": [], "rannc-run, starts the daemon": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.touch()
        for number in range(repeats + 1):
            for name in list(times)[:: 1 if number % 2 else -1]:
                command = [*MPIRUN, sys.executable, str(script)] if name == "mpirun" else [*RANNC_RUN, str(script)]
                if name == "rannc-run, starts the daemon":
                    end_daemon(environment)
                elif name == "rannc-run, daemon runs":
                    timed(command, environment)
                took = timed(command, uncached if name == "rannc-run, no cache" else environment)
                if number:
                    times[name].append(took)
    more, _ = tell("An empty script", times)
    found("start", more["rannc-run, starts the daemon"])


def first_step(environment: Mapping[str, str], repeats: int, size: list[str]) -> None:
    """Measure a GPT-2 until the end of its first step."""
    sides = {"torchrun": (TORCHRUN, "ddp"), "rannc-run": (RANNC_RUN, "rannd")}
    gpt2(RANNC_RUN, "rannd", environment, *size)  # plans
    times: dict[str, dict[str, list[float]]] = {}
    cpu = "CPU time of rank 0 from built to its first step"
    for number in range(repeats + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            launcher, side = sides[name]
            begun, told = gpt2(launcher, side, environment, *size)
            moments = {
                "script": max(each["began"] for each in told),
                "built": max(each["built"] for each in told),
                "first step": max(each["ends"][0] for each in told),
            }
            for moment, when in moments.items() if number else ():
                times.setdefault(moment, {}).setdefault(name, []).append(when - begun)
            if number:
                times.setdefault(cpu, {}).setdefault(name, []).append(told[0]["cpu"])
    for moment, each in times.items():
        _, ratios = tell(f"GPT-2 {' '.join(size)}, cached, until: {moment}", {name: each[name] for name in sides})
        if moment == "first step":
            found("start-torchrun", ratios["rannc-run"])


def modules(environment: Mapping[str, str], repeats: int, size: list[str]) -> None:
    """List the unwanted modules that a run with a warm cache imports, and measure their import time."""
    for _ in range(2):
        _, told = gpt2(RANNC_RUN, "rannd", environment, *size)
    for rank, each in enumerate(told):
        before, after = set(each["before"]), set(each["modules"])
        theirs = [name for name in UNWANTED if name in before]
        ours = [name for name in UNWANTED if name in after - before]
        note(f"rank {rank}, before the model is wrapped (script, torch.optim, transformers): {', '.join(theirs)}")
        note(f"rank {rank}, from then to the end of the first step: {', '.join(ours) or 'none of them'}")
        note(f"rank {rank}: {len(after - before)} modules since then, {len(after)} in total")
    imports = {
        "import torch": "import torch",
        "and torch._dynamo (any torch.optim.Optimizer)": "import torch, torch._dynamo",
        "and pyrannc": "import torch, pyrannc",
        "and both": "import torch, torch._dynamo, pyrannc",
    }
    times: dict[str, list[float]] = {name: [] for name in imports}
    for number in range(repeats + 1):
        for name in list(imports)[:: 1 if number % 2 else -1]:
            took = timed([sys.executable, "-c", imports[name]], environment)
            if number:
                times[name].append(took)
    tell("Imports", times)


if __name__ == "__main__":
    main()
