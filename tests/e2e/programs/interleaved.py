"""Trains a model of four stages; rank 0 saves losses, norms, outputs and the end: equal however stages are placed.

usage: interleaved.py FOLDER

Microbatches have the same numbers for any number of ranks, and so the same dropout masks in each stage. A tied weight,
a value that three stages read, clipping, a GradScaler, gradients that wait, a call whose backward is asked for twice,
gradients of inputs, and an evaluation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from rannd.plan.schedule.program import ActionKind
from rannd.runtime.comm.world import made
from rannd.runtime.gradients import gradient_buckets

gradient_buckets.FIRST_BUCKET = gradient_buckets.BUCKET = 512  # bytes: gradients of a stage come in several buckets
PIECES, ROWS, STEPS, WORDS, WIDTH = 8, 2, 4, 11, 12
FOLDER, RANK, RANKS = Path(sys.argv[1]), pyrannc.get_rank(), pyrannc.get_world_size()
torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.third, self.fourth = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.cuts = nn.ModuleList(pyrannc.CutPoint() for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Tensor, shift: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        early = self.drop(torch.tanh(self.first(self.table(words)) + shift))
        x = self.norm(self.drop(self.second(self.cuts[0](early))))
        self.seen += 1
        x = torch.tanh(self.drop(self.third(self.cuts[1](x)))) + early
        logits = F.linear(self.fourth(self.cuts[2](x)) * early, self.table.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        return loss if self.training else (loss, logits)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's mini-batch: the microbatches of its numbers."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (PIECES, ROWS, 3), generator=generator)
    shifts = torch.randn(PIECES, ROWS, 3, WIDTH, generator=generator)
    mine = range(RANK, PIECES, RANKS)
    return torch.cat([words[each] for each in mine]), torch.cat([shifts[each] for each in mine]).requires_grad_()


def whole(shift: Tensor) -> Tensor:
    """The gradients of all ranks' inputs, by microbatch: of the mean over ranks, as those of parameters."""
    assert shift.grad is not None
    told = [torch.empty_like(shift.grad) for _ in range(RANKS)]
    torch.distributed.all_gather(told, shift.grad)
    return torch.stack([each.view(PIECES // RANKS, ROWS, 3, WIDTH) for each in told], 1).flatten(0, 1) / RANKS


def note_reductions() -> set[int]:
    """The stages, noted from now on, in whose computations reductions of gradients begin."""
    stages: set[int] = set()
    world, reducing = made(), model._session._deployed.reducer
    start = reducing._start

    def starting(bucket: Any) -> None:
        if len(bucket.slots) > 1 and world is not None and world.watch.where.action is not None:
            stages.add(world.watch.where.stage or 0)
        start(bucket)

    reducing._start = starting
    return stages


torch.manual_seed(3)
inner = Model()
optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, eps=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
model: Any = pyrannc.RaNNCModule(inner, optimizer, scaler=scaler)
found: list[Tensor] = []
for step in range(STEPS):
    words, shift = batch(step)
    pyrannc.delay_grad_allreduce(step == 1)
    loss = model(words, shift)
    scaler.scale(loss).backward()
    found += [loss.detach(), whole(shift)]
    if step == 1:
        reduced_in = note_reductions()
        continue
    scaler.unscale_(optimizer)
    found.append(model.clip_grad_norm(0.1))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    found.append(model.get_param("second.weight"))

(inside,) = model._session._graphs.executors()
deployment = model.deployment
program = inside.bound.interleaved.traffic.program
placed = deployment.schedule not in ("1f1b", "zb_h1")
assert len(inside.stages) == program.layout.virtual_stages == (2 if placed else 1), deployment.schedule
halves = [each for each in program.slots[inside.bound.slot] if each.kind is ActionKind.WEIGHT]
assert (len(halves) > 0) == deployment.schedule.startswith("zb"), (deployment.schedule, halves)
assert len(deployment.stages) == 4
if len(deployment.stages[0].slots) > 1:  # each stage's gradients are reduced while earlier stages still compute
    assert reduced_in == set(inside.stages), reduced_in

model.eval()
with torch.no_grad():
    loss, logits = model(*batch(7))
found.append(loss)
assert logits.shape == (PIECES // RANKS * ROWS, 3, WORDS)
words, shift = batch(8)
loss, logits = model(words, shift)  # two outputs: backward is asked for
total = loss + logits.square().mean()
total.backward(retain_graph=True)
once = whole(shift).clone()
total.backward()
torch.testing.assert_close(whole(shift), 2 * once, rtol=1e-12, atol=1e-15)
state = model.state_dict()
whole_optimizer = optimizer.state_dict(from_global=True)
gradients = [model.get_param_grad(name) for name, _ in model.named_parameters(from_global=True)]
if RANK == 0:
    assert state["seen"] == STEPS + 2
    names = [name for name, _ in inner.named_parameters()]
    found += [state[name] for name in names] + [each for each in gradients if each is not None]
    moments = [each[key] for each in whole_optimizer["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    torch.save([*found, *moments], FOLDER / f"{deployment.schedule}-{RANKS}.pt")
model.undeploy()
print(f"rank {RANK} has trained under {deployment.schedule}", flush=True)
