"""Trains a model with 512 MiB of parameters, 2 GiB with gradients and Adam's state; prints losses to the bit.

usage: large_model.py [MIB]

`MIB`: what the process may have of private memory after its first step; before, addresses without memory are taken for
the trace. The most memory that was in use is printed.
"""

from __future__ import annotations

import sys

import torch
from matrices import SIZE, Layer
from memory_watch import MemoryWatch, limit
from torch import nn

import pyrannc

LAYERS, STEPS = 32, 3


def main() -> None:
    watch = MemoryWatch()
    watch.start()
    torch.manual_seed(0)
    with pyrannc.DistributeModelParams():
        inner = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-4)
    model = pyrannc.RaNNCModule(inner, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}: loss {float(loss.detach()).hex()}", flush=True)
        if sys.argv[1:]:
            limit(int(sys.argv[1]))
    size = sum(each.numel() * each.element_size() for each in inner.parameters())
    print(f"parameters {size >> 20} MiB, most memory {watch.end()} MiB", flush=True)


main()
