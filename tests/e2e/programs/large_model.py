"""Trains a model whose parameters are larger than the memory that the process may have; prints losses to the bit.

usage: large_model.py [MIB]

`MIB`: what the process may have of private memory (RLIMIT_DATA), into which mapped files do not count. The parameters
take 512 MiB, with gradients and Adam's state 2 GiB.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import nn

import pyrannc

LAYERS, SIZE, STEPS = 32, 2048, 2


class Layer(nn.Module):
    """One matrix, added to what goes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def private_mib() -> int:
    """Private memory of this process in MiB, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmData:"))


def main() -> None:
    if sys.argv[1:]:
        most = int(sys.argv[1]) << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
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
        print(f"step {step}: loss {float(loss.detach()).hex()}, private memory {private_mib()} MiB", flush=True)
    size = sum(each.numel() * each.element_size() for each in inner.parameters())
    print(f"parameters {size >> 20} MiB", flush=True)


main()
