"""Trains a chain of layers under ZeRO 3, and tells how often its parameters were gathered, and what it has learnt."""

from __future__ import annotations

import torch
from torch import nn

import pyrannc
from rannd.plan.stage_costs import estimate
from rannd.runtime.zero.replica_exchange import PendingGather, ReplicaExchange

estimate.SEGMENT = 0  # bytes: each block is a segment, as in a large model
WIDTH, LAYERS = 256, 6

gather = ReplicaExchange.gather
counted = [0]


def counting(self: ReplicaExchange, flat: torch.Tensor, length: int) -> PendingGather:
    counted[0] += 1
    return gather(self, flat, length)


ReplicaExchange.gather = counting  # type: ignore[method-assign]


class Net(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
wrapped = pyrannc.RaNNCModule(model, optimizer)
for step in range(3):
    torch.manual_seed(10 * step + pyrannc.get_rank())
    before = counted[0]
    optimizer.zero_grad()
    loss = wrapped(torch.randn(8, WIDTH))
    loss.backward()
    optimizer.step()
    last = counted[0] - before
segments = sum(len(stage.segments) for stage in wrapped.deployment.stages)
whole = [stage.stays_whole for stage in wrapped.deployment.stages]
print(f"rank {pyrannc.get_rank()}: {last} gathers of {segments} segments, whole {whole}, loss {float(loss.detach())!r}")
