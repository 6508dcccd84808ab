"""Train two models one after the other; before each of them, wait until the file `<folder>/<name>` is there.

rannc-run -np 2 two_models.py FOLDER
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn, optim

import pyrannc

folder = Path(sys.argv[1])
rank = pyrannc.get_rank()


def reached(name):
    print(f"reached {name}", flush=True)
    deadline = time.monotonic() + 120
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"nobody made {folder / name}")
        time.sleep(0.01)


def train(name, width):
    reached(name)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    opt = optim.SGD(model.parameters(), lr=0.01)
    model = pyrannc.RaNNCModule(model, opt)
    torch.manual_seed(rank)
    x, target = torch.randn(4, width), torch.randn(4, width)
    for step in range(3):
        opt.zero_grad()
        loss = (model(x) - target).pow(2).sum(dim=1).mean()
        loss.backward()
        opt.step()
        print(f"{name} rank={rank} step={step} loss={loss.item():.3f}", flush=True)


train("first", 8)
train("second", 16)
print(f"Finished on rank{rank}", flush=True)
