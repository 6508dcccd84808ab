"""Ways to train a model of _peer_workloads.py on all ranks: rannd, and its peers, as their users write them.

A step returns the loss of the rank's mini-batch or of the whole batch; None on ranks of a pipeline that do not know it.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _in_turns import Training
from _peer_workloads import Workload
from torch import Tensor, nn

import pyrannc

MICROBATCHES = 4
"""In the batch of all ranks, under torch's schedules."""


def rannd(workload: Workload, rank: int) -> Training:
    """Nothing is forced: the planner chooses."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    return _looped(workload, rank, pyrannc.RaNNCModule(model, optimizer), optimizer)


def ddp(workload: Workload, rank: int) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(workload.model())
    return _looped(workload, rank, model, workload.optimizer(model.parameters()))


def fsdp2(workload: Workload, rank: int) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = workload.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in workload.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _looped(workload, rank, model, workload.optimizer(model.parameters()))


def accelerate(workload: Workload, rank: int) -> Training:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), workload.model()
    model, optimizer = accelerator.prepare(model, workload.optimizer(model.parameters()))
    return _looped(workload, rank, model, optimizer, accelerator.backward)


def zero(stage: int, workload: Workload, rank: int) -> Training:
    """DeepSpeed's engine with the workload's own optimizer."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Else it compiles a kernel for a minute and more at its first start, which only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = workload.model()
    inputs, targets = workload.batch(rank)
    config = {
        "train_micro_batch_size_per_gpu": len(inputs),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it would clip to a norm of 1
    }
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=workload.optimizer(model.parameters()), config=config)

    def step() -> Tensor:
        loss = workload.train(engine, inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(engine, engine.optimizer, step)


def _looped(
    workload: Workload, rank: int, model: Any, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward
) -> Training:
    inputs, targets = workload.batch(rank)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = workload.train(model, inputs, targets)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Stage(nn.Module):
    """Consecutive parts of a model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Any) -> Any:
        for value in values:
            if value.requires_grad:  # torch cannot receive the gradient of a part of a concatenation as it is
                value.register_hook(Tensor.contiguous)
        for part in self.parts:
            found = part(*values)
            values = found if isinstance(found, tuple) else (found,)
        return values if len(values) > 1 else values[0]


def pipelining(schedule: str, per_rank: int, workload: Workload, rank: int) -> Training:
    """Stages with equally many parts of the model, `per_rank` on each rank, under a schedule of torch."""
    from torch.distributed import pipelining

    world = dist.get_world_size()
    count = per_rank * world
    model = workload.model()
    parts = workload.parts(model)
    bounds = [round(number * len(parts) / count) for number in range(count + 1)]
    stages = [
        pipelining.PipelineStage(Stage(parts[bounds[number] : bounds[number + 1]]), number, count, torch.device("cpu"))
        for number in range(rank, count, world)
    ]
    made: Any = getattr(pipelining, schedule)
    runs = made(stages if per_rank > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=workload.loss)
    optimizer = workload.optimizer([each for stage in stages for each in stage.submod.parameters()])
    tied = workload.tied(model)
    inputs, targets = _whole_batch(workload)
    last = rank == world - 1

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        runs.step(*(() if rank else (inputs,)), **({"target": targets, "losses": losses} if last else {}))
        if tied is not None:  # the first and the last rank have a copy each
            dist.all_reduce(tied.grad)
        optimizer.step()
        return torch.stack(losses).mean().detach() if last else None

    return Training(model, optimizer, step)


SIDES: dict[str, Callable[[Workload, int], Training]] = {
    "rannd": rannd,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "gpipe": partial(pipelining, "ScheduleGPipe", 1),
    "1f1b": partial(pipelining, "Schedule1F1B", 1),
    "interleaved": partial(pipelining, "ScheduleInterleaved1F1B", 2),
    "zero-bubble": partial(pipelining, "ScheduleInterleavedZeroBubble", 2),
    "accelerate": accelerate,
    "zero-1": partial(zero, 1),
    "zero-2": partial(zero, 2),
}


def _whole_batch(workload: Workload) -> tuple[Tensor, Tensor]:
    """Of all ranks."""
    inputs, targets = zip(*(workload.batch(rank) for rank in range(dist.get_world_size())), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def plain(workload: Workload, pieces: int, steps: int) -> list[float]:
    """Losses of the first steps of one process that adds up the gradients of equal pieces of the batch."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    inputs, targets = (each.chunk(pieces) for each in _whole_batch(workload))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [workload.train(model, x, target) / pieces for x, target in zip(inputs, targets, strict=True)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        found.append(sum(float(loss) for loss in losses))
    return found


@contextmanager
def _told(folder: Path, side: str) -> Iterator[None]:
    """Leaves in `folder` which side is under way, and what it raised."""
    rank = pyrannc.get_rank()
    (folder / f"side-{rank}").write_text(side)
    try:
        yield
    except Exception as exc:
        (first, *_) = str(exc).strip().splitlines() or [""]
        (folder / f"error-{rank}").write_text(f"{type(exc).__name__}: {first}")
        raise


def in_turns(
    workload: Workload, sides: Sequence[str], rounds: int, steps: int, checked: int, folder: Path
) -> dict[str, Any]:
    """Train with all sides in turns.

    Returns for each side the losses of its first `checked` steps (mean over ranks) and the samples/s of each round but
    the first; and the losses of plain PyTorch, and rannd's plan. Collective. `sides` begins with rannd, which connects
    the ranks.
    """
    from rannd.plan.plan_text import plan_line

    rank = pyrannc.get_rank()
    runs: dict[str, Training] = {}
    losses: dict[str, list[float]] = {}
    for side in sides:
        with _told(folder, side):
            runs[side] = SIDES[side](workload, rank)
            losses[side] = [_mean(runs[side].step()) for _ in range(checked)]
    rates: dict[str, list[float]] = {side: [] for side in sides}
    samples = steps * len(_whole_batch(workload)[0])
    order = list(sides)
    shuffle = random.Random(0)  # the same on each rank
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for side in order:
            with _told(folder, side):
                pyrannc.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    runs[side].step()
                pyrannc.barrier()
                if number:
                    rates[side].append(samples / (time.perf_counter() - start))
    with _told(folder, "plain PyTorch"):
        pieces = {"whole": dist.get_world_size(), "microbatches": MICROBATCHES}
        reference = {name: plain(workload, count, checked) for name, count in pieces.items()}
    plan = plan_line(runs["rannd"].wrapped.deployment)
    return {"losses": losses, "rates": rates, "reference": reference, "plan": plan}


def _mean(loss: Tensor | None) -> float:
    """Over the ranks that have a loss. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, math.nan if loss is None else float(loss))
    return statistics.fmean(each for each in told if not math.isnan(each))
