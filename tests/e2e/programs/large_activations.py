"""Trains a model whose blocks start from 384 MiB of values, and keep twice as much more; prints losses to the bit.

usage: large_activations.py [MIB]

`MIB`: what the process may have of private memory after its first step. The most memory that was in use since then is
printed.
"""

from __future__ import annotations

import sys

import torch
from memory_watch import MemoryWatch, limit
from torch import nn

import pyrannc

LAYERS, STEPS, ROWS, SIZE = 24, 3, 16_384, 256


class Layer(nn.Module):
    """Values of 16 MiB, added to what goes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def main() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-3)
    model = pyrannc.RaNNCModule(inner, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {float(loss.detach()).hex()}", flush=True)
        if step == 0:
            watch = MemoryWatch()
            watch.start()
            if sys.argv[1:]:
                limit(int(sys.argv[1]))
    print(f"most memory {watch.end()} MiB", flush=True)


main()
