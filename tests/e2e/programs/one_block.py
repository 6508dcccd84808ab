"""A model whose own forward nobody can trace."""

from __future__ import annotations

import torch
from torch import nn

import pyrannc


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a):
        b = self.one(a)
        return self.two(b if b.norm() > 1 else -b)


net = Net()
model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
model(torch.randn(4, 8)).sum().backward()
