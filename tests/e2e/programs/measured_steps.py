"""Trains for 24 steps, and prints the computations of each slot's Program.

usage: measured_steps.py [nodes]     nodes: ranks believe to be on nodes of their own
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import pyrannc
from rannd.plan.schedule.program import ActionKind
from rannd.runtime.comm import world

ROWS, STEPS = 16, 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def main() -> None:
    if sys.argv[1:] == ["nodes"]:
        world.node_identity = lambda: f"node{pyrannc.get_rank()}"
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(ROWS, 64)).backward()
        optimizer.step()
    bound = next(iter(wrapped._session._graphs.executors())).bound
    computed = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
    names = [str(each) for each in bound.traffic_of(inside=True).program.slots[bound.slot] if each.kind in computed]
    print(f"slot {bound.slot} computes {' '.join(names)} .", flush=True)
    measuring = wrapped._session.measuring
    assert measuring is not None
    assert measuring.measured is not None
    assert len(measuring.measured.ranks) == pyrannc.get_world_size(), "all ranks have the times of all ranks"


if __name__ == "__main__":
    main()
