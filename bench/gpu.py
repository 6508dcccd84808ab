"""Everything worth knowing on a machine with one GPU, in 25 minutes: a JSON file and a page, go or no-go at the end.

    python bench/gpu.py [correct speed estimates shared] [--device auto] [--out .gpu/results]

correct    one rank beside eager PyTorch, in float64 to 1e-9, and the tests marked gpu
speed      GPT-2 in bfloat16, in turns with eager PyTorch and torch.compile; device reads and synchronisations of a step
estimates  the planner's step time and memory beside what is measured
shared     two and four ranks on the one device, through the host's memory: parity, and what is told of ranks that fail

Each part is a process with a time budget of its own; it writes its results one by one, and a part that fails or runs
out of time does not keep the others from running. The exit code is 1 if a result is wrong or missing. On a CPU sizes
are small, times and estimates are reported but not judged.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from _gpu import page, record
from _starting import home

BUDGET_S = {"correct": 420.0, "speed": 450.0, "estimates": 270.0, "shared": 330.0}
"""Seconds of each part, less than 25 minutes in all: no check begins later."""
LAST_CHECK_S = 90.0
"""Seconds beyond the budget for the check that is running then, before the part is ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*page.PARTS, []], help="default: all")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(".gpu/results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--here", action="store_true", help="run one part in this process, as this script does")
    options = parser.parse_args()
    parts = options.parts or [*page.PARTS]
    if options.here:
        measure(parts[0], options.device, options.out, options.only)
        return
    for part in parts:
        print(f"== {part}", flush=True)
        supervise(part, options.device, options.out, options.only)
    told = record.read(options.out)
    print(f"\n{page.ending(told)}\nresults: {options.out / record.FILE}, {options.out / record.PAGE}", flush=True)
    sys.exit(page.failed(told, parts))


def measure(part: str, device: str, folder: Path, only: str) -> None:
    """Carry out the checks of a part."""
    from importlib import import_module

    from _gpu import machine

    here = machine.find(device)
    os.environ["RANNC_DEVICE"] = here.device.type
    if here.small:
        import torch

        torch.set_num_threads(1)
    facts = machine.facts(here) | ({"checks": f"only those with '{only}' in their name"} if only else {})
    record.Record(folder, part, facts).run(import_module(f"_gpu.{part}").checks(here), BUDGET_S[part], only)


def supervise(part: str, device: str, folder: Path, only: str) -> None:
    """Carry out a part in a process of its own, which is ended when it takes too long, and note how it has ended."""
    told = record.read(folder)
    told.get("parts", {}).pop(part, None)
    record.put(folder, record.Part(part), told.get("machine", {}))
    command = [sys.executable, __file__, part, "--here", "--device", device, "--out", str(folder), "--only", only]
    with home() as environment:
        process = subprocess.Popen(command, env={**environment, "RANNC_LOG_LEVEL": "warn"}, start_new_session=True)
        try:
            process.wait(BUDGET_S[part] + LAST_CHECK_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            process.wait()
    if process.returncode:
        told = record.read(folder)["parts"][part]
        if told["ended"] != record.DONE:
            ended = record.LATE if process.returncode == -signal.SIGKILL else record.BROKEN
            left = record.Part(part, told["seconds"], ended)
            left.results = [record.Result(**each) for each in told["results"]]
            record.put(folder, left, record.read(folder)["machine"])


if __name__ == "__main__":
    main()
