"""Measures what ZeRO saves and costs: bytes of each rank, time of a step, models that only fit with it.

    python bench/memory.py [bytes throughput fit larger offload] [--ranks 2 4] [--rounds 20] [--steps 4] [--layers 10 .]

GPT-2 of transformers with AdamW, one stage, every rank a replica (gloo, one thread per rank).

bytes       what each rank has between steps and at the peak of one, beside the plan's numbers. A part that a stage of
            ZeRO shares has to be 1 / ranks of the whole within 2 %, any other whole; else the exit code is 1
throughput  two ranks, with each stage of ZeRO, compared with DistributedDataParallel, and ZeRO 3 with torch's FSDP2
            (fully_shard of each layer and of the whole), both with parameters that stay whole between forward and
            backward and with others (reshard_after_forward), in the same processes, in turns. A ratio above 1.0 means
            that rannd is faster; goals: 0.97 for ZeRO 1, 0.95 for ZeRO 2, 1.0 of FSDP2's for ZeRO 3
fit         the memory limit is hardly more than the least that a plan of one stage needs with ZeRO: without it, none
            fits. The planner is left to take ZeRO (zero_stage=auto), first with one stage, then with as many as it
            likes. Mini-batches are small, so that memory is what the optimizer and the parameters need. The exit code
            is 1 if the model does not train within the limit, or with one stage without ZeRO
larger      one rank, a model of four times the layers and twice the width, and a process that may have a third of the
            training state (values, gradients and AdamW's state) as private memory; the planner is left to offload what
            it likes. The exit code is 1 if the model does not train within the limit
offload     one rank: what of the training state is in memory and what in files between steps, beside the plan's
            numbers, and the step's time with offload_optimizer, offload_params and both and without, in turns, and
            with offload_activations beside recomputing in memory; goal: at most 1.3 of it. The files are in the
            cache's folder, or RANNC_OFFLOAD_DIR. The exit code is 1 if more than 2 % of what is offloaded is in memory,
            or a loss differs
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from _in_turns import GptSizes, Training, compare, gpt2, training
from _results import Table, found, note
from _starting import SCRIPTS
from _tensor_bytes import lying, lying_and_peak, mapped_files, regions

PROGRAMS = Path(__file__).resolve().parent.parent / "tests" / "e2e" / "programs"
WHAT = ("bytes", "throughput", "fit", "larger", "offload")
PLAIN = {"RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1", "RANNC_CACHE": "off", "RANNC_MEM_MARGIN": "0"}
ONE_STAGE = {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1"}
PARTS = ("parameters", "gradients", "optimizer")
NEAR = 0.02
NOTHING_AWAY = {
    "RANNC_OFFLOAD_OPTIMIZER": "0",
    "RANNC_OFFLOAD_PARAMS": "0",
    "RANNC_OFFLOAD_ACTIVATIONS": "0",
    "RANNC_CHECKPOINTING": "0",
}
OFFLOADS = {
    "in memory": {},
    "state": {"RANNC_OFFLOAD_OPTIMIZER": "1"},
    "parameters": {"RANNC_OFFLOAD_PARAMS": "1"},
    "both": {"RANNC_OFFLOAD_OPTIMIZER": "1", "RANNC_OFFLOAD_PARAMS": "1"},
    "recomputing": {"RANNC_CHECKPOINTING": "1"},
    "activations": {"RANNC_OFFLOAD_ACTIVATIONS": "1"},
}
BESIDE = {"state": "in memory", "parameters": "in memory", "both": "in memory", "activations": "recomputing"}
OFFLOADED = {
    "in memory": (),
    "state": ("optimizer",),
    "parameters": ("parameters", "gradients"),
    "both": ("parameters", "gradients", "optimizer"),
    "recomputing": (),
    "activations": (),
}
WARM_UP = 3
MORE = 1.02
"""The limit of `fit` / the least memory that suffices with ZeRO."""
STATE_PER_VALUE = 4
"""Value, gradient and AdamW's two moments."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 15)}
"""glibc gives back the memory of freed tensors, so that a process has what is in use: activations of 128 KiB, too."""
SHARE = 3
"""The training state / the limit of `larger`."""
SMALL = {"rows": 2, "length": 32}
"""The mini-batch of `fit`."""


@dataclass(frozen=True)
class Way:
    """How replicas hold a model."""

    name: str
    variables: dict[str, str]
    shared: tuple[str, ...] = ()
    """Those of `PARTS` of which each replica has only its share."""
    goal: str = ""
    """Of its throughput, as a share of that of `peer`: one of GOALS."""
    peer: str = "DistributedDataParallel"


WAYS = (
    Way("ZeRO 0", {"RANNC_ZERO_STAGE": "0"}),
    Way("ZeRO 1", {"RANNC_ZERO_STAGE": "1"}, ("optimizer",), "zero-1"),
    Way("ZeRO 2", {"RANNC_ZERO_STAGE": "2"}, ("gradients", "optimizer"), "zero-2"),
    Way("ZeRO 3", {"RANNC_ZERO_STAGE": "3"}, PARTS, "zero-3", "FSDP2"),
    Way(
        "ZeRO 3, resharding",
        {"RANNC_ZERO_STAGE": "3", "RANNC_RESHARD_AFTER_FORWARD": "1"},
        PARTS,
        "zero-3",
        "FSDP2, resharding",
    ),
)
DDP = "DistributedDataParallel"
FSDP2 = {"FSDP2": False, "FSDP2, resharding": True}
"""Whether parameters are let go of after a forward."""


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
        for ranks in {"throughput": [2], "larger": [1], "offload": [1]}.get(what, options.ranks):
            command = [str(SCRIPTS / "rannc-run"), "-np", str(ranks), "--show-ranks", "0", __file__, what, *given]
            variables = {**os.environ, **PLAIN, **(GIVEN_BACK if what == "larger" else {})}
            worst = max(worst, subprocess.run(command, env=variables, check=False).returncode)
    sys.exit(worst)


def measure(what: str, sizes: GptSizes, rounds: int, steps: int) -> bool:
    """Whether what has to hold does."""
    if what == "bytes":
        return tensor_bytes(sizes)
    if what == "offload":
        return offload(sizes, rounds, steps)
    if what == "larger":
        return larger(replace(sizes, layers=4 * sizes.layers, width=2 * sizes.width, **SMALL))
    return throughput(sizes, rounds, steps) if what == "throughput" else fit(replace(sizes, **SMALL))


def wrapped(sizes: GptSizes, variables: dict[str, str]) -> Training:
    """The model under a plan that these variables of the environment force, after its first step."""
    import pyrannc

    kept = {*PLAIN, "RANNC_OFFLOAD_DIR"}
    for name in [name for name in os.environ if name.startswith("RANNC_") and name not in kept]:
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

    worst = 0.0
    whole: list[float] = []
    names = (*PARTS, "peak")
    table = Table(
        f"Bytes of tensors between steps and at the peak of one, {pyrannc.get_world_size()} ranks", "ZeRO", "rank",
        *((name, "{:.2f} MiB") for name in names), *((f"{name} / planned", "{:.2f}") for name in names),
    )  # fmt: skip
    for way in WAYS:
        made = wrapped(sizes, {**ONE_STAGE, **way.variables})
        for _ in range(WARM_UP):
            made.step()
        parts = lying(made.wrapped, made.optimizer)
        _, most = lying_and_peak(made.step, made.wrapped, made.optimizer)
        plan = estimate(made)
        planned = (plan.param_bytes, plan.grad_bytes, plan.optimizer_bytes, plan.total_bytes)
        told = gathered([*parts, most])
        whole = whole or list(parts)
        for rank, each in enumerate(told):
            ratios = [here / there for here, there in zip(each, planned, strict=True)]
            table.row(way.name, rank, *(size / 2**20 for size in each), *ratios)
            for part, here, full in zip(PARTS, each, whole, strict=False):
                due = full / len(told) if part in way.shared else full
                worst = max(worst, abs(here / due - 1))
        pyrannc.clear()
    return found("zero-bytes", worst, f"{len(told)} ranks, the worst of all parts and stages of ZeRO")


def throughput(sizes: GptSizes, rounds: int, steps: int) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    import pyrannc

    sides = {way.name: wrapped(sizes, {**ONE_STAGE, **way.variables}).step for way in WAYS}
    sides[DDP] = training(sizes, pyrannc.get_rank(), lambda model, _: DistributedDataParallel(model)).step
    for name, reshards in FSDP2.items():
        sides[name] = training(sizes, pyrannc.get_rank(), partial(sharded, reshards)).step
    pairs = [
        *((way.name, DDP) for way in WAYS),
        *((way.name, way.peer) for way in WAYS if way.peer in FSDP2),
        *((name, DDP) for name in FSDP2),
    ]
    ratios = compare("GPT-2, replicas on two ranks", sides, rounds, steps, pairs)
    for way in WAYS:
        if way.goal:
            found(way.goal, ratios[f"{way.name} / {way.peer}"], f"{way.name} / {way.peer}")
    return True


def sharded(reshards: bool, model: Any, optimizer: Any) -> Any:
    """The model under FSDP2, and its optimizer with the parameters that it has then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import pyrannc

    mesh = init_device_mesh("cpu", (pyrannc.get_world_size(),))
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)  # the rest stays whole, torch's default
    (group,) = optimizer.param_groups
    group["params"][:] = list(model.parameters())
    return model


def fit(sizes: GptSizes) -> bool:
    import pyrannc
    from rannd.errors import DoesNotFitError
    from rannd.plan.plan_text import plan_line

    def needed(way: Way) -> int:
        """Bytes of a device that a plan of one stage needs at least."""
        try:
            wrapped(sizes, {"RANNC_PARTITION_NUM": "1", "RANNC_MEM_LIMIT_GB": "0.001", **NOTHING_AWAY, **way.variables})
        except DoesNotFitError as exc:
            return exc.needed
        raise AssertionError(f"{sizes} fits 1 MiB")

    whole, *others = gathered([needed(way) for way in WAYS])[0]  # rank 0's error has the number
    shared = min(others)
    state = training_state(sizes)
    limit = MORE * shared
    ranks = pyrannc.get_world_size()
    note(
        f"{ranks} ranks: a plan of one stage needs at least {whole / 2**20:.1f} MiB without ZeRO, "
        f"{shared / 2**20:.1f} with it; the limit is {limit / 2**20:.1f}, {limit / state:.2f} of values, gradients and "
        f"AdamW's state"
    )
    table = Table(
        f"A limit that one stage without ZeRO does not keep, {ranks} ranks", "asked for", "plan",
        ("first loss", "{:.4f}"), ("last loss", "{:.4f}"), ("peak", "{:.1f} MiB"), ("limit", "{:.1f} MiB"),
    )  # fmt: skip
    good = True
    for asked, variables in (("one stage", {"RANNC_PARTITION_NUM": "1"}), ("any stages", {})):
        made = wrapped(sizes, {"RANNC_MEM_LIMIT_GB": repr(limit / 2**30), **NOTHING_AWAY, **variables})
        losses = [float(made.step()) for _ in range(WARM_UP)]
        _, most = lying_and_peak(made.step, made.wrapped, made.optimizer)
        most = max(each for (each,) in gathered([most]))
        plan = plan_line(made.wrapped.deployment)
        table.row(asked, plan, losses[0], losses[-1], most / 2**20, limit / 2**20)
        good &= most <= limit and losses[-1] < losses[0] and (made.wrapped.deployment.zero > 0 or not variables)
        pyrannc.clear()
    return good


def larger(sizes: GptSizes) -> bool:
    sys.path.insert(0, str(PROGRAMS))
    from memory_watch import MemoryWatch, private_mib

    import pyrannc
    from rannd.plan.plan_text import plan_line

    made = wrapped(replace(sizes, layers=1, width=64, words=64), {})
    made.step()
    pyrannc.clear()  # libraries are imported now, also those with which rannd traces and profiles
    del made
    state = training_state(sizes) / 2**20
    own, limit = private_mib(), state / SHARE
    made = wrapped(sizes, {"RANNC_MEM_LIMIT_GB": repr((limit - own) / 2**10)})
    watch = MemoryWatch()
    watch.start()
    losses = [float(made.step()) for _ in range(WARM_UP)]
    most = watch.end()
    table = Table(
        "A process that may have a third of the training state as private memory, one rank", "plan",
        *((name, "{:.0f} MiB") for name in ("training state", "limit", "of it Python and libraries", "most")),
        ("first loss", "{:.4f}"), ("last loss", "{:.4f}"),
    )  # fmt: skip
    table.row(plan_line(made.wrapped.deployment), state, limit, own, most, losses[0], losses[-1])
    return most <= limit and losses[-1] < losses[0]


def training_state(sizes: GptSizes) -> int:
    """Bytes of values, gradients and AdamW's state of the model."""
    return STATE_PER_VALUE * sum(each.numel() * each.element_size() for each in gpt2(sizes).parameters())


def offload(sizes: GptSizes, rounds: int, steps: int) -> bool:
    good = True
    sides: dict[str, Any] = {}
    table = Table(
        "What is in files between steps, one rank", "offloaded", "what", ("size", "{:.2f} MiB"),
        ("in memory", "{:.2f} MiB"), ("planned elsewhere, of all", "{:.2f} MiB"),
    )  # fmt: skip
    losses: list[list[float]] = []
    for name, items in OFFLOADS.items():
        made = wrapped(sizes, {**ONE_STAGE, **NOTHING_AWAY, **items})
        losses.append([float(made.step()) for _ in range(WARM_UP)])
        plan, files = estimate(made), mapped_files()
        for what, places in regions(made.wrapped, made.optimizer).items():
            size = sum(places.values())
            away = sum(count for place, count in places.items() if any(place in file for file in files))
            table.row(name, what, size / 2**20, (size - away) / 2**20, plan.offloaded_bytes / 2**20)
            good &= what not in OFFLOADED[name] or size - away <= NEAR * size
        sides[name] = made.step
    good &= all(each == losses[0] for each in losses)
    pairs = [(plain, other) for other, plain in BESIDE.items()]
    times = compare("GPT-2, one rank, offloaded and in memory", sides, rounds, steps, pairs)
    for other, plain in BESIDE.items():
        found("offload", times[f"{plain} / {other}"], f"{other}, beside {plain}")
    return good


if __name__ == "__main__":
    main()
