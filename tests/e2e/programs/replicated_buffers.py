"""Trains a model whose replicated first stage has buffers that are written, but no parameters; ranks print losses."""

from __future__ import annotations

import torch
from torch import nn

import pyrannc
from rannd.runtime.comm.world import made


class Free(nn.Module):
    """The first part takes most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for _ in range(40):
            x = torch.tanh(x @ x.new_ones(16, 16) * 0.05)
        return (self.last(x) - y).square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    inner = Free().double()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(inner, optimizer)
    for step in range(3):
        torch.manual_seed(step + 10 * pyrannc.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16).double(), torch.randn(8, 16).double())
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.12f}", flush=True)
    world = made()
    assert world is not None
    replicas = [list(stage.slots) for stage in model.deployment.stages if len(stage.slots) > 1]
    print(f"groups {sorted(map(list, world.groups))} for replicas {replicas} over {world.transport.name}", flush=True)
