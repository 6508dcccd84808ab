"""Everything worth knowing on a machine with one GPU, in 25 minutes: a JSON file and a page, go or no-go at the end.

    python bench/gpu.py [correct speed estimates shared] [--device auto] [--out .gpu/results]

correct    one rank beside eager PyTorch, in float64 to 1e-9, and the tests marked gpu
speed      GPT-2 in bfloat16, in turns with eager PyTorch and torch.compile; device reads and synchronisations of a step
estimates  the planner's step time and memory beside what is measured
shared     two and four ranks on the one device, through the host's memory: parity, and what is told of ranks that fail

Each part is a process with a time budget of its own; it writes its results one by one, and a part that fails or runs
out of time does not keep the others from running. A check that hangs, or ends its process, or after which the device
computes no more, is a wrong result; another process goes on with the checks after it. The exit code is 1 if a result is
wrong or missing. On a CPU sizes are small, times and estimates are reported but not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from _gpu import page, record
from _starting import home

BUDGET_S = {"correct": 420.0, "speed": 450.0, "estimates": 270.0, "shared": 330.0}
"""Seconds of each part: no check begins later."""
TOTAL_S = 1500.0
"""Seconds of all parts: what earlier ones leave of it is there for `LAST_CHECK_S`."""
LAST_CHECK_S = 90.0
"""Seconds beyond the budget for the check that is running then, before the part is ended."""
CHECK_S = {"correct": 200.0, "speed": 300.0, "estimates": 120.0, "shared": 250.0}
"""Seconds of a check on a GPU: one that takes longer hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*page.PARTS, []], help="default: all")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(".gpu/results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--here", action="store_true", help="run one part in this process, as this script does")
    parser.add_argument("--go-on", action="store_true", help="with --here: after the checks that were begun before")
    options = parser.parse_args()
    parts = options.parts or [*page.PARTS]
    if options.here:
        measure(parts[0], options.device, options.out, options.only, goes_on=options.go_on)
        return
    end = time.monotonic() + TOTAL_S
    for place, part in enumerate(parts, 1):
        print(f"== {part}", flush=True)
        later = sum(BUDGET_S[each] for each in parts[place:])
        supervise(part, options.device, options.out, options.only, end - later - time.monotonic())
    told = record.read(options.out)
    print(f"\n{page.ending(told)}\nresults: {options.out / record.FILE}, {options.out / record.PAGE}", flush=True)
    sys.exit(page.failed(told, parts))


def measure(part: str, device: str, folder: Path, only: str, *, goes_on: bool) -> None:
    """Carry out the checks of a part, those that were not begun yet if it `goes_on`."""
    from importlib import import_module

    from _gpu import machine

    here = machine.find(device)
    os.environ["RANNC_DEVICE"] = here.device.type
    if here.small:
        import torch

        torch.set_num_threads(1)
    facts = machine.facts(here) | ({"checks": f"only those with '{only}' in their name"} if only else {})
    checks = import_module(f"_gpu.{part}").checks(here)
    limit = None if here.small else CHECK_S[part]
    found = record.Record(folder, part, facts, goes_on=goes_on)
    found.run(checks, BUDGET_S[part], only, limit_s=limit, alive=here.compute)


def supervise(part: str, device: str, folder: Path, only: str, most_s: float = TOTAL_S) -> None:
    """Carry out a part in processes of its own: the next one goes on where one has ended too early.

    They are ended when they take too long, `most_s` seconds at most. How the part has ended is noted.
    """
    record.put(folder, record.Part(part), {})
    end = time.monotonic() + min(BUDGET_S[part] + LAST_CHECK_S, most_s)
    command = [sys.executable, __file__, part, "--here", "--device", device, "--out", str(folder), "--only", only]
    with home() as environment:
        environment = {**environment, "RANNC_LOG_LEVEL": "warn"}
        begun = 0
        while code := _run(command, environment, end - time.monotonic()):
            left = record.known(folder, part)
            if left is None or left.ended == record.DONE:
                return
            if left.running:
                left.results.append(_ended(left.running, code, folder))
            left.running, left.ended = "", record.LATE if code == -signal.SIGKILL else record.BROKEN
            record.put(folder, left, {})
            if left.begun == begun or time.monotonic() > end:
                return
            begun = left.begun
            command = [*command, "--go-on"]


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int:
    """Run a command, for some seconds at most; returns its exit code."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that it has started, too
        process.wait()
    return process.returncode


def _ended(check: str, code: int, folder: Path) -> record.Result:
    """The result of a check with which its process has ended."""
    stacks = folder / record.STACKS
    where = stacks.read_text(errors="replace") if stacks.exists() else ""
    found = "took too long" if where or code == -signal.SIGKILL else f"ended its process, exit code {code}"
    return record.Result(check, False, found, note=where[: record.TOLD])


if __name__ == "__main__":
    main()
