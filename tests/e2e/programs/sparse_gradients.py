"""Sparse gradients, which ranks sum up as dense ones, and parameters without elements: equal to one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pyrannc

RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 7, sparse=True)
        self.last = nn.Linear(7, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed(tokens)).pow(2).mean() + self.nothing.sum()


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def main() -> None:
    plain, plain_optimizer = build()
    inner, optimizer = build()
    model: Any = pyrannc.RaNNCModule(inner, optimizer)
    for number in range(3):
        tokens = torch.randint(0, 50, (8, 4), generator=torch.Generator().manual_seed(number))
        for one, other, rows in (
            (plain, plain_optimizer, tokens),
            (model, optimizer, tokens.tensor_split(WORLD)[RANK]),
        ):
            other.zero_grad()
            one(rows).backward()
            other.step()
        found, wanted = model.get_param_grad("embed.weight"), plain.embed.weight.grad
        assert torch.allclose(found, wanted.to_dense(), rtol=1e-9, atol=1e-13)
    state = model.state_dict()
    if RANK == 0:
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), name
    print(f"rank {RANK} has right sparse gradients under ZeRO {model.deployment.zero}")


main()
