"""Trains a model whose training state is much larger than its parameters; prints each step's loss to the bit.

usage: large_state.py {Adam|Adafactor} [MIB]

`MIB`: what the process may have of private memory (RLIMIT_DATA), into which mapped files do not count.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from matrices import SIZE, Layer
from torch import nn

import pyrannc

LAYERS, STEPS = 20, 3


def private_mib() -> int:
    """Private memory of this process in MiB, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmData:"))


def main() -> None:
    if sys.argv[2:]:
        most = int(sys.argv[2]) << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.manual_seed(0)
    inner = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    settings = {"amsgrad": True} if sys.argv[1] == "Adam" else {}
    optimizer = getattr(torch.optim, sys.argv[1])(inner.parameters(), lr=1e-3, **settings)
    model = pyrannc.RaNNCModule(inner, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step)))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {float(loss.detach()).hex()}, private memory {private_mib()} MiB", flush=True)
    held = [p for _, p in model.named_parameters(own=True)]
    moments = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    size = sum(each.nbytes for each in (*held, *(p.grad for p in held if p.grad is not None), *moments))
    print(f"training state {size >> 20} MiB", flush=True)


main()
