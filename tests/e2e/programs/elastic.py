"""Trains over global batches of 12 rows, elastically. Usage: elastic.py FOLDER EPOCHS {sgd|adam} [PAUSE_S]

Rank 0 appends 'step loss ranks' to FOLDER/losses for each step; at the end it writes the parameters to FOLDER/end.pt.
FOLDER/at_STEP, if it exists, is a Python file that rank R executes before that step (with `rank`, `ranks` and `rows`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrannc

FOLDER, EPOCHS, KIND = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
PAUSE_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
RANK, RANKS = pyrannc.get_rank(), pyrannc.get_world_size()
BATCH, SAMPLES = 12, 88  # the last batch has 4 rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.layers(x)).squeeze(1), y)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model: nn.Module = Net()
    x = torch.randn(SAMPLES, 16)
    data = TensorDataset(x, x.sum(1).sin())
    kinds = {"sgd": lambda of: torch.optim.SGD(of, 0.1, momentum=0.9), "adam": lambda of: torch.optim.Adam(of, 0.01)}
    optimizer = kinds[KIND](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    model = pyrannc.RaNNCModule(model, optimizer)
    sampler = pyrannc.ElasticSampler(data, BATCH, seed=7, balance=True)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=0)
    state = pyrannc.elastic(model, optimizer, scheduler, sampler, directory=FOLDER / "checkpoints", every=5)
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for rows, targets in loader:
            hook = FOLDER / f"at_{state.step}"
            if hook.exists():
                exec(compile(hook.read_text(), str(hook), "exec"), {"rank": RANK, "ranks": RANKS, "rows": rows})
            time.sleep(PAUSE_S)
            optimizer.zero_grad()
            loss = model(rows, targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if RANK == 0:
                with (FOLDER / "losses").open("a") as file:
                    file.write(f"{state.step} {loss.item():.17g} {RANKS}\n")
    values = model.state_dict()
    if RANK == 0:
        torch.save({"model": values, "step": state.step, "lr": scheduler.get_last_lr()}, FOLDER / "end.pt")


main()
