"""Trains on the same rows however many ranks share them; `alone`: one process without rannd, with the rows of four.

Prints a digest of the parameters in double precision after each step.
"""

from __future__ import annotations

import sys

import torch

RANKS, STEPS = 4, 4

torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)
).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
mine = list(range(RANKS))
if sys.argv[1:] != ["alone"]:
    import pyrannc

    model = pyrannc.RaNNCModule(model, optimizer)
    assert pyrannc.get_world_size() == RANKS
    mine = [pyrannc.get_rank()]

for step in range(STEPS):
    rows = torch.randn(RANKS, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(rows[mine].flatten(0, 1)).square().mean()
    loss.backward()
    optimizer.step()
    state = model.state_dict()
    words = f"{sum(float(value.abs().sum()) for value in state.values()):.10f}" if 0 in mine else "done"
    print(f"after step {step}: {words}", flush=True)
