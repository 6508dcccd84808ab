"""Frozen parameters that calls write or replace are those of one process; all ranks have the same mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from yardstick import RANK, same, same_parameters

import pyrannc


class Centre(nn.Module):
    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.write, self.mean = write, nn.Parameter(torch.zeros(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x.detach().mean(0))
        return x - self.mean


def by_data(centre: Any, mean: torch.Tensor) -> None:
    centre.mean.data = centre.mean.data * 0.9 + mean * 0.1


def in_data(centre: Any, mean: torch.Tensor) -> None:
    centre.mean.data += mean * 0.1


def by_another(centre: Any, mean: torch.Tensor) -> None:
    centre.mean = nn.Parameter(centre.mean * 0.9 + mean * 0.1, requires_grad=False)


def in_place(centre: Any, mean: torch.Tensor) -> None:
    with torch.no_grad():
        centre.mean.mul_(0.9).add_(mean, alpha=0.1)


def network(write: Callable[[Any, torch.Tensor], None]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), Centre(write), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


for write in (by_data, in_data, by_another, in_place):
    plain, inner = network(write), network(write)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, inner)]
    model = pyrannc.RaNNCModule(inner, optimizers[1])
    for number in range(4):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        found = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        same(found[1], found[0], f"{write.__name__}: loss {number}")
    same_parameters(model, plain, write.__name__)
print(f"written parameters are right on rank {RANK}", flush=True)
