"""Trains a model with 512 MiB of parameters, 2 GiB with gradients and Adam's state; prints losses to the bit.

usage: large_model.py [MIB]

`MIB`: what the process may have of private memory (RLIMIT_DATA) after its first step, into which mapped files do not
count; before, addresses without memory are taken for the trace. The most memory that was in use is printed.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import torch
from matrices import SIZE, Layer
from torch import nn

import pyrannc

LAYERS, STEPS = 32, 3


class Watch(threading.Thread):
    """Looks at the private memory in use, in MiB, a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            self.most = max(self.most, *(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:")))


def main() -> None:
    watch = Watch()
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
            most = int(sys.argv[1]) << 20
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch.ended.set()
    watch.join()
    size = sum(each.numel() * each.element_size() for each in inner.parameters())
    print(f"parameters {size >> 20} MiB, most memory {watch.most} MiB", flush=True)


main()
