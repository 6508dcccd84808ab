"""Batches with ids, files and objects, and numbers that change: as one process, on stages (argument: how many)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from yardstick import RANK, SIZE, Plain, batches, same

import pyrannc
from rannd.errors import StepError, UsageError
from rannd.runtime.traces import trace_provider

STAGES = int(sys.argv[1])
traces = 0
trace = trace_provider.trace


def counted(*args: Any) -> Any:
    global traces
    traces += 1
    return trace(*args)


trace_provider.trace = counted


class Net(nn.Module):
    """Reads only the tensors of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any], scale: float = 1.0, times: int = 1) -> torch.Tensor:
        x = torch.tanh(self.first(batch["x"])) * scale
        for _ in range(times):
            x = self.second(x)
        result: torch.Tensor = self.last(torch.tanh(x))
        return result * scale


def batch(x: torch.Tensor, rank: int, number: int) -> dict[str, Any]:
    rows = range(len(x))
    return {
        "x": x,
        "ids": [f"{number}-{rank}-{row}" for row in rows],
        "index": [number + row for row in rows],
        "file": Path(f"/data/{rank}/{number}"),
        "meta": {"made": object(), "name": f"of rank {rank}"},
    }


torch.manual_seed(5)
net = Net().double()


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


plain = Plain(net, make)
optimizer = make(net.parameters())
model = pyrannc.RaNNCModule(net, optimizer)
assert plain.optimizer is not None
for number in range(8):
    scales = [0.5 + 0.1 * number + 0.01 * rank * (number > 2) for rank in range(SIZE)]  # at last of each rank's own
    times = 1 + (number > 4)
    given = batches(number)
    optimizer.zero_grad()
    plain.optimizer.zero_grad()
    model(batch(given[RANK], RANK, number), scale=scales[RANK], times=times).pow(2).sum().backward()
    for rank, x in enumerate(given):
        (plain.model(batch(x, rank, number), scale=scales[rank], times=times).pow(2).sum() / SIZE).backward()
    optimizer.step()
    plain.optimizer.step()
    for name, p in model.named_parameters(own=True):
        same(p, dict(plain.model.named_parameters())[name], f"step {number}: {name}")
assert len(model.deployment.stages) == STAGES
# The first call; the scale as an input; `times` as an input, which fails, and its second value.
assert traces == 4, traces


class Returning(Net):
    def forward(self, batch: dict[str, Any]) -> Any:
        return {"out": super().forward(batch), "ids": batch["ids"], "file": batch["file"]}


returning = pyrannc.RaNNCModule(Returning().double(), None)
for number in range(2):
    call = batch(given[RANK], RANK, number)
    found = returning(call)
    assert found["ids"] is call["ids"]
    assert found["file"] is call["file"]


class First(Net):
    def forward(self, batch: dict[str, Any]) -> Any:
        return {"out": super().forward(batch), "id": batch["ids"][0]}


first = pyrannc.RaNNCModule(First().double(), None)
with pytest.raises(StepError, match=r"'0-0-0'.*A string that the model's code reads is part of the call"):
    first(batch(given[RANK], RANK, 0))
pyrannc.clear()

# With rank 0's batch for all ranks, what is returned is rank 0's as well, so that it counts as read.
shared = pyrannc.RaNNCModule(Returning().double(), None, gather_inputs=False)
with pytest.raises((StepError, UsageError)):
    shared(batch(given[RANK], RANK, 0))
print(f"plain arguments are right on rank {RANK}", flush=True)
