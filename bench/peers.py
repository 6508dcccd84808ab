"""Other packages that train on two ranks, compared with rannd's own plan: two ranks on this machine, one thread each.

    python bench/peers.py steps [--workloads tutorial digits gpt2 resnet head unet] [--sides ddp fsdp2 ...]
                                [--rounds 6] [--steps 3 (of tutorial and digits ten times as many)]
    python bench/peers.py jobs [--jobs rannd ddp ...] [--steps 50] [--repeats 3]

Both by default.

steps  For each workload a job, in which all sides train a model of their own in the same two processes, with
       rannc-run's malloc settings and gloo, one side at a time; the order is shuffled every round, and the first round
       is dropped. The losses of each side's first steps are compared with plain PyTorch: one process that adds up the
       gradients of the ranks' mini-batches or, beside torch's schedules, of microbatches (with BatchNorm these differ).
       A side with other losses has an error in its row and is nobody's best. "rannd / side" is the ratio of their
       throughputs in the same round: above 1.0 rannd is faster. One process is not a side: it varies too much on CPUs.

       rannd        its own plan, from a cache that is empty at first; nothing is forced
       ddp          DistributedDataParallel
       fsdp2        fully_shard of each layer, then of the model
       gpipe, 1f1b  torch.distributed.pipelining: two stages with equally many layers, 4 microbatches
       interleaved, zero-bubble
                    the same with two stages on each rank: Interleaved1F1B, InterleavedZeroBubble
       accelerate   Accelerator.prepare, data parallelism
       zero-1, zero-2
                    DeepSpeed. transformers and accelerate behave differently where it can be imported, so these sides
                    have a job of their own, with rannd and DistributedDataParallel again; they need `make peers`. A
                    kernel that only inference uses is switched off: DeepSpeed would compile it at its first start

       The weight that GPT-2's first and last layer share has a copy on both ranks under torch's schedules; the
       gradients of both are summed by hand, which torch does not do. Stages of the U-Net hand on skip connections that
       they do not use, and make gradients contiguous by a hook, without which these schedules refuse them. A side that
       fails has the first line of its error in its row; the job starts again without it.

jobs   Whole jobs, as users start them: a GPT-2 trained by the scripts in bench/_peer_jobs, without any settings, one
       job after the other. Times are those of a job's later rank; "first step" is from the command to the end of the
       first step, "all steps" from there to the end of the last one. "memory" is the most resident memory of a rank's
       process. "lines" is how many lines of the one-process script (bench/_peer_jobs/train_plain.py) were changed,
       removed or added, without blank lines and comments. "cold" is rannd with an empty cache, "repeated" the same job
       again. All scripts train on the same tokens: their last losses agree, or the job has an error in its row.
       accelerate and DeepSpeed are started by torchrun, which both support
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from _peer_runs import DEEPSPEED, DEEPSPEED_VARIABLES, JOBS, LONGEST_S, compare_jobs, ended
from _results import Spread, Table, found, note
from _starting import RANNC_RUN, home

WORKLOADS = ("tutorial", "digits", "gpt2", "resnet", "head", "unet")
SIDES = {
    "rannd": "rannd",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2",
    "gpipe": "torch GPipe",
    "1f1b": "torch 1F1B",
    "interleaved": "torch Interleaved1F1B",
    "zero-bubble": "torch InterleavedZeroBubble",
    "accelerate": "accelerate",
    "zero-1": "DeepSpeed ZeRO 1",
    "zero-2": "DeepSpeed ZeRO 2",
}
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ZERO = ("zero-1", "zero-2")
SHORT = {"tutorial": 10, "digits": 10}
"""So many steps count as one where one takes a few milliseconds."""
CHECKED = 3
"""First steps whose losses are compared."""
NEAR = 1e-5
"""Of losses, relative: float32, sums in another order. In three steps losses change by 5e-3 and more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["steps", "jobs", []], help="both by default")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="NAME")
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="NAME", help="and rannd"
    )
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, help="of a side in a round (default: 3); of a job (default: 50)")
    parser.add_argument("--repeats", type=int, default=3, help="of each job")
    parser.add_argument("--small", action="store_true", help="tiny models, for tests: times mean nothing")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        on_a_rank(options)
        return
    right = True
    for what in options.what or ("steps", "jobs"):
        if what == "jobs":
            right &= compare_jobs(options.jobs, options.steps or 50, options.repeats, options.small)
        else:
            right &= compare_steps(options)
    sys.exit(0 if right else 1)


def on_a_rank(options: argparse.Namespace) -> None:
    """Train, and leave the results in a file."""
    from _peer_sides import in_turns
    from _peer_workloads import workload

    import pyrannc

    (name,) = options.workloads
    told = in_turns(
        workload(name, options.small), options.sides, options.rounds, options.steps, CHECKED, options.folder
    )
    if pyrannc.get_rank() == 0:
        (options.folder / "results").write_text(json.dumps(told))


@dataclass
class Results:
    """Of a workload's job."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    reference: dict[str, list[float]] = field(default_factory=dict)
    plan: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    """First lines, by side."""

    def ratios(self, side: str) -> list[float]:
        """Rannd's throughput / a side's, of each round."""
        return [one / other for one, other in zip(self.rates["rannd"], self.rates[side], strict=True)]

    def away(self, side: str) -> float:
        """The largest relative difference of a loss from plain PyTorch's."""
        beside = self.reference["microbatches" if side in PIPELINES else "whole"]
        return max(abs(one / other - 1) for one, other in zip(self.losses[side], beside, strict=True))

    def is_right(self, side: str) -> bool:
        return side in self.rates and self.away(side) <= NEAR


def compare_steps(options: argparse.Namespace) -> bool:
    """Whether rannd's losses are right everywhere."""
    best: dict[str, float] = {}
    right = True
    of_deepspeed = [side for side in options.sides if side in ZERO]
    if of_deepspeed and not DEEPSPEED.is_dir():
        note(f"DeepSpeed is left out: {DEEPSPEED} is not there, `make peers` makes it")
        of_deepspeed = []
    others = [side for side in options.sides if side != "rannd" and side not in ZERO]
    with home() as environment:
        environment |= {"OMP_NUM_THREADS": "1", "RANNC_LOG_LEVEL": "warn"}
        for name in options.workloads:
            steps = (options.steps or 3) * SHORT.get(name, 1)
            table = Table(
                f"{name}: two ranks, {options.rounds} rounds of {steps} steps of each side",
                "side", ("samples/s", "{:.1f}"), ("rannd / side", "{:.3f}"), ("losses differ by", "{:.0e}"), "error",
            )  # fmt: skip
            ratios = {}
            jobs: list[tuple[str, list[str], dict[str, str]]] = []
            if others or not of_deepspeed:
                jobs.append(("", ["rannd", *others], {}))
            if of_deepspeed:
                jobs.append((", again", ["rannd", "ddp", *of_deepspeed], DEEPSPEED_VARIABLES))
            for again, sides, variables in jobs:
                results = run(name, sides, steps, options, {**environment, **variables})
                for side in sides:
                    tell(table, SIDES[side] + (again if side not in ZERO else ""), side, results)
                    if side != "rannd" and results.is_right(side) and (side in ZERO or not again):
                        ratios[side] = statistics.median(results.ratios(side))
                right &= results.is_right("rannd")
            note(f"rannd's plan: {results.plan}")
            if ratios:
                side = min(ratios, key=lambda each: ratios[each])
                best[name] = ratios[side]
                note(f"best peer: {SIDES[side]}")
    if best:
        told = ", ".join(f"{name} {ratio:.3f}" for name, ratio in best.items())
        found("peer-best", math.exp(statistics.fmean(map(math.log, best.values()))), told)
    packages = ("torch", "transformers", "accelerate")
    note(f"{', '.join(f'{each} {version(each)}' for each in packages)}; load average {os.getloadavg()[0]:.1f}")
    return right


def tell(table: Table, told: str, side: str, results: Results) -> None:
    """The row of a side."""
    if side in results.errors:
        table.row(told, None, None, None, results.errors[side])
        return
    rates, ratio, away = Spread.of(results.rates[side]), Spread.of(results.ratios(side)), results.away(side)
    table.row(told, rates, ratio, away, None if results.is_right(side) else "wrong losses")


def run(
    name: str, sides: Sequence[str], steps: int, options: argparse.Namespace, environment: Mapping[str, str]
) -> Results:
    """Run the job of a workload, without those sides that end it: a failed rank cannot go on with the other one."""
    errors: dict[str, str] = {}
    while True:
        left = [side for side in sides if side not in errors]
        with tempfile.TemporaryDirectory() as folder:
            command = [*RANNC_RUN, __file__, "steps", "--workloads", name, "--sides", *left, "--folder", folder]
            command += ["--rounds", str(options.rounds), "--steps", str(steps)]
            code, output = ended([*command, *(["--small"] if options.small else [])], environment)
            if not code:
                return Results(**json.loads((Path(folder) / "results").read_text()), errors=errors)
            # The first error is the cause: other ranks miss the one that failed.
            said = min(Path(folder).glob("error-*"), key=lambda file: file.stat().st_mtime_ns, default=None)
            at = Path(folder) / (said.name.replace("error", "side") if said else "side-0")
            side = at.read_text() if at.exists() else ""
            text = said.read_text() if said else f"the job ended with {code}, after {LONGEST_S} s at most"
        if side not in left[1:]:
            sys.exit(f"{' '.join(command)} failed (exit code {code}):\n{''.join(line for _, line in output)}")
        errors[side] = text


if __name__ == "__main__":
    main()
