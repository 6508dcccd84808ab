"""Trains one model under 1F1B and under zero-bubble, cut at the same place: losses, norms and parameters are equal.

Dropout, a frozen layer, a weight that two operators read, layers that stay whole, clipping, a GradScaler, and a step
whose gradients wait for the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from rannd.plan.schedule.program import ActionKind

STEPS, ROWS, WORDS = 4, 8, 11
torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    """Images and words; each of the two stages has layers that separate, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.frozen = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.table, self.norm = nn.Embedding(WORDS, 64), nn.LayerNorm(64)
        self.cut = pyrannc.CutPoint()
        self.up, self.drop, self.gru = nn.Linear(64, 128), nn.Dropout(0.3), nn.GRU(64, 64, batch_first=True)
        self.frozen.requires_grad_(False)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        seen = self.frozen(self.conv(image).relu()).flatten(1).unsqueeze(1)
        x = self.norm(self.drop(self.table(words)) + seen)
        x = self.cut(x)
        x, _ = self.gru(self.drop(F.linear(self.up(x).relu_(), self.up.weight.t())))
        return F.cross_entropy(F.linear(x, self.up.weight).flatten(0, 1), words.flatten())


def train(schedule: str) -> Iterator[Tensor]:
    """Everything that a step gives, step by step."""
    os.environ["RANNC_SCHEDULE"] = schedule
    torch.manual_seed(3)
    inner = Model()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3, eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = pyrannc.RaNNCModule(inner, optimizer, scaler=scaler)
    generator = torch.Generator().manual_seed(pyrannc.get_rank())
    for step in range(STEPS):
        image = torch.randn(ROWS, 2, 4, 4, generator=generator)
        words = torch.randint(WORDS, (ROWS, 3), generator=generator)
        pyrannc.delay_grad_allreduce(step == 1)
        loss = model(image, words)
        scaler.scale(loss).backward()
        yield loss.detach()
        if step == 1:
            continue
        scaler.unscale_(optimizer)
        yield model.clip_grad_norm(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    whole = model.state_dict()  # the two plans may have other replicas
    if pyrannc.get_rank() == 0:
        yield from whole.values()
    executor = next(iter(model._session._graphs.executors()))
    program = executor.bound.interleaved.traffic.program.slots[executor.bound.slot]
    delayed = sum(action.kind is ActionKind.WEIGHT for action in program)
    assert (delayed > 0) == (schedule == "zb_h1"), f"{schedule} has {delayed} second halves"
    for number, stage in executor.stages.items():
        names = {name for name, count in stage.late_arrivals.items() if count and "frozen" not in name}
        first = {"conv.weight", "conv.bias", "table.weight"}
        assert names == (first if number == 0 else {"up.weight", "up.bias"}) or schedule == "1f1b", names


one, other = list(train("1f1b")), list(train("zb_h1"))
for number, (expected, found) in enumerate(zip(one, other, strict=True)):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text, at=number: f"{at}: {text}")
print(f"rank {pyrannc.get_rank()}: {len(one)} values are equal", flush=True)
