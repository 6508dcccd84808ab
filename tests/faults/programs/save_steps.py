"""Save checkpoints of a model's steps at one place; a folder ``acked-STEP`` is made when a save has returned."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import pyrannc

root, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = pyrannc.RaNNCModule(net, optimizer)
for step in range(steps):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    pyrannc.save_checkpoint(f"{root}/runs/first", model, optimizer, step=step)
    os.mkdir(f"{root}/acked-{step}")
