"""Trains a small decoder with dropout; ranks print losses, and how many graphs inductor has compiled.

usage: compiled.py ROWS DROPOUT [BACKEND]     BACKEND: aot_eager compiles without making code
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


if __name__ == "__main__":
    rows = int(sys.argv[1])
    if len(sys.argv) > 3:
        from rannd.runtime.compiling import compiler

        compiler.BACKEND = sys.argv[3]
    torch.manual_seed(0)
    inner = Decoder(float(sys.argv[2])).double()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.05)
    model = pyrannc.RaNNCModule(inner, optimizer)
    for step in range(3):
        torch.manual_seed(step + 10 * pyrannc.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5)))
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.10f}", flush=True)
    made = 0
    if "torch._dynamo.utils" in sys.modules:
        made = sys.modules["torch._dynamo.utils"].counters["inductor"]["fxgraph_cache_miss"]
    print(f"inductor compiled {made} graphs", flush=True)
