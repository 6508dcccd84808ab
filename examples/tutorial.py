"""Trains a sequence of linear layers, partitioned over the ranks.

    rannc-run -np 2 examples/tutorial.py BATCH HIDDEN LAYERS

BATCH is the mini-batch of one rank. With `64 512 10` the model is small enough for data parallelism; the planner
chooses pipeline stages if all-reducing gradients would take longer than a pipeline's bubble. With
`RANNC_MEM_LIMIT_GB=0.05` only stages fit into memory.
"""

import sys

import torch
from torch import nn, optim

import pyrannc

STEPS = 3


class Net(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


if len(sys.argv) != 4:
    sys.exit("usage: tutorial.py BATCH HIDDEN LAYERS, for example: tutorial.py 64 512 10")
batch_size, hidden, layers = map(int, sys.argv[1:])
rank = pyrannc.get_rank()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(rank)

model = Net(hidden, layers)
if rank == 0:
    print(f"#Parameters={sum(p.numel() for p in model.parameters())}", flush=True)
opt = optim.SGD(model.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(model, opt)

x = torch.randn(batch_size, hidden, requires_grad=True).to(device)
target = torch.randn(batch_size, hidden).to(device)
for step in range(STEPS):
    opt.zero_grad()
    out = model(x)
    loss = (out - target).pow(2).sum(dim=1).mean()
    loss.backward()
    opt.step()
    print(f"rank={rank} step={step} loss={loss.item():.4f}", flush=True)
print(f"Finished on rank{rank}", flush=True)
