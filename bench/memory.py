"""Measures what ZeRO saves and costs: bytes of each rank, time of a step, models that only fit with it.

    python bench/memory.py [bytes throughput fit] [--ranks 2 4] [--rounds 20] [--steps 4] [--layers 10 --width 256 ..]

GPT-2 of transformers with AdamW, one stage, every rank a replica (gloo, one thread per rank).

bytes       what each rank has between steps and at the peak of one, beside the plan's numbers. A part that a stage of
            ZeRO shares has to be 1 / ranks of the whole within 2 %, any other whole; else the exit code is 1
throughput  two ranks, with each stage of ZeRO, compared with DistributedDataParallel in the same processes, in turns.
            A ratio above 1.0 means that rannd is faster; goal: 0.97
fit         mem_limit_gb between what a plan of one stage needs without ZeRO and with it; the planner is free to take
            ZeRO or stages (zero_stage=auto). Without ZeRO one stage must not fit; the exit code is 1 if it does, or if
            the model does not train within the limit under the plan that is chosen
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _in_turns import GptSizes, Training, compare, training
from _starting import SCRIPTS
from _tensor_bytes import lying, lying_and_peak

WHAT = ("bytes", "throughput", "fit")
PLAIN = {"RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1", "RANNC_CACHE": "off", "RANNC_MEM_MARGIN": "0"}
ONE_STAGE = {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1"}
PARTS = ("parameters", "gradients", "optimizer")
NEAR = 0.02
GOAL = 0.97
WARM_UP = 3


@dataclass(frozen=True)
class Way:
    """How replicas hold a model."""

    name: str
    variables: dict[str, str]
    shared: tuple[str, ...] = ()
    """Those of `PARTS` of which each replica has only its share."""


WAYS = (
    Way("ZeRO 0", {"RANNC_ZERO_STAGE": "0"}),
    Way("ZeRO 1", {"RANNC_ZERO_STAGE": "1"}, ("optimizer",)),
)
DDP = "DistributedDataParallel"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], help="measurements (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks of bytes and fit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    for name, default in zip(("layers", "width", "words", "length", "rows"), (10, 256, 8192, 128, 8), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    sizes = GptSizes(options.layers, options.width, options.words, options.length, options.rows)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        sys.exit(0 if measure(options.what[0], sizes, options.rounds, options.steps) else 1)
    given = [f"--{name}={getattr(options, name)}" for name in ("rounds", "steps", *vars(sizes))]
    worst = 0
    for what in options.what or WHAT:
        for ranks in [2] if what == "throughput" else options.ranks:
            print(f"-- {what}, {ranks} ranks", flush=True)
            command = [str(SCRIPTS / "rannc-run"), "-np", str(ranks), "--show-ranks", "0", __file__, what, *given]
            worst = max(worst, subprocess.run(command, env={**os.environ, **PLAIN}, check=False).returncode)
    sys.exit(worst)


def measure(what: str, sizes: GptSizes, rounds: int, steps: int) -> bool:
    """Whether what has to hold does."""
    if what == "bytes":
        return tensor_bytes(sizes)
    return throughput(sizes, rounds, steps) if what == "throughput" else fit(sizes)


def wrapped(sizes: GptSizes, variables: dict[str, str]) -> Training:
    """The model under a plan that these variables of the environment force, after its first step."""
    import pyrannc

    for name in [name for name in os.environ if name.startswith("RANNC_") and name not in PLAIN]:
        del os.environ[name]
    os.environ.update(variables)
    made = training(sizes, pyrannc.get_rank(), pyrannc.RaNNCModule)
    made.step()
    return made


def gathered(mine: Sequence[float]) -> list[list[float]]:
    """The numbers of every rank. Collective."""
    import torch
    import torch.distributed as dist

    numbers = torch.tensor(mine, dtype=torch.float64)
    told = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(told, numbers)
    return [each.tolist() for each in told]


def estimate(made: Training) -> Any:
    """The plan's numbers for this rank."""
    slot = made.wrapped._session.world.slot
    return next(stage.estimate for stage in made.wrapped.deployment.stages if slot in stage.slots)


def tensor_bytes(sizes: GptSizes) -> bool:
    import pyrannc

    good = True
    whole: list[float] = []
    if not pyrannc.get_rank():
        print(f"{'MiB, and measured / planned':28s} " + " ".join(f"{name:>16s}" for name in (*PARTS, "peak")))
    for way in WAYS:
        made = wrapped(sizes, {**ONE_STAGE, **way.variables})
        for _ in range(WARM_UP):
            made.step()
        found = lying(made.wrapped, made.optimizer)
        _, most = lying_and_peak(made.step, made.wrapped, made.optimizer)
        plan = estimate(made)
        planned = (plan.param_bytes, plan.grad_bytes, plan.optimizer_bytes, plan.total_bytes)
        told = gathered([*found, most])
        whole = whole or list(found)
        for rank, each in enumerate(told):
            cells = [f"{a / 2**20:9.2f} ({a / b:.2f})" for a, b in zip(each, planned, strict=True)]
            if not pyrannc.get_rank():
                print(f"{f'{way.name}, rank {rank}':28s} {' '.join(f'{cell:>16s}' for cell in cells)}")
            for part, here, full in zip(PARTS, each, whole, strict=False):
                due = full / len(told) if part in way.shared else full
                if abs(here / due - 1) > NEAR:
                    good = False
                    print(f"{way.name}, rank {rank}: {here:.0f} bytes of {part}, {due:.0f} were due", file=sys.stderr)
        if not pyrannc.get_rank():
            for part, here, full in zip(PARTS, told[0], whole, strict=False):
                if part in way.shared:
                    print(f"{way.name}: {part} are {here / full:.4f} of the whole, 1 / {len(told)} is due")
        pyrannc.clear()
    return good


def throughput(sizes: GptSizes, rounds: int, steps: int) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    import pyrannc

    sides = {way.name: wrapped(sizes, {**ONE_STAGE, **way.variables}).step for way in WAYS}
    sides[DDP] = training(sizes, pyrannc.get_rank(), lambda model, _: DistributedDataParallel(model)).step
    pairs = [(way.name, DDP) for way in WAYS]
    for name, ratio in compare(sides, rounds, steps, pairs).items():
        print(f"{name}: {'reaches' if ratio >= GOAL else 'MISSES'} the goal, {GOAL}")
    return True


def fit(sizes: GptSizes) -> bool:
    import pyrannc
    from rannd.errors import DoesNotFitError
    from rannd.plan.plan_text import plan_line

    first = not pyrannc.get_rank()
    needs = []
    for way in WAYS[:2]:
        made = wrapped(sizes, {**ONE_STAGE, **way.variables})
        needs.append(max(stage.estimate.total_bytes for stage in made.wrapped.deployment.stages))
        state = sum(lying(made.wrapped, made.optimizer)) if way == WAYS[0] else state
        pyrannc.clear()
    limit = sum(needs) / 2
    if first:
        print(f"one stage needs {needs[0] / 2**20:.1f} MiB without ZeRO, {needs[1] / 2**20:.1f} with stage 1;", end=" ")
        print(f"parameters, gradients and state of the optimizer alone {state / 2**20:.1f}; limit {limit / 2**20:.1f}")
    limited = {"RANNC_MEM_LIMIT_GB": repr(limit / 2**30)}
    try:
        wrapped(sizes, {**limited, **ONE_STAGE, **WAYS[0].variables})
    except DoesNotFitError as exc:
        if first:
            print(f"zero_stage=0, one stage: {exc}")
    else:
        print("zero_stage=0 fits the limit with one stage", file=sys.stderr)
        return False
    made = wrapped(sizes, limited)
    losses = [float(made.step()) for _ in range(WARM_UP)]
    _, most = lying_and_peak(made.step, made.wrapped, made.optimizer)
    most = max(each for each, in gathered([most]))
    if first:
        print(f"zero_stage=auto: {plan_line(made.wrapped.deployment)}")
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, peak {most / 2**20:.1f} MiB")
    return most <= limit and losses[-1] < losses[0]


if __name__ == "__main__":
    main()
