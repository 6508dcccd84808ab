"""Trains elastically; one host becomes slow after the model was planned. Usage: straggling.py FOLDER HOST

Each rank writes its host to FOLDER/start_<ranks>_<rank>, and its rows of a batch to FOLDER/rows_<ranks>_<rank>. The
first start trains until it is asked to leave, the next one ends by itself.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrannc
from rannd.runtime.elastic import stragglers
from rannd.runtime.failure.nan_check import Finite

FOLDER, SLOW = Path(sys.argv[1]), sys.argv[2]
RANK, RANKS = pyrannc.get_rank(), pyrannc.get_world_size()
stragglers.STEPS, stragglers.SECONDS = 10, 1.0  # a test need not wait for twice ten seconds
(FOLDER / f"start_{RANKS}_{RANK}").write_text(socket.gethostname())


slow_s = 0.0
"""Seconds that a forward takes longer on the host."""


def slowed(self: Finite, *arguments: Any) -> Any:
    time.sleep(slow_s)
    return run(self, *arguments)


run = Finite.run
Finite.run = slowed  # type: ignore[method-assign]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def main() -> None:
    global slow_s
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model = pyrannc.RaNNCModule(model, optimizer)
    sampler = pyrannc.ElasticSampler(range(240), 12, balance=True)
    loader = DataLoader(TensorDataset(torch.randn(240, 64)), batch_sampler=sampler)
    state = pyrannc.elastic(model, optimizer, None, sampler, directory=FOLDER / "checkpoints")
    epochs = sampler.epoch + (2 if state.restored else 5000)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for (rows,) in loader:
            (FOLDER / f"rows_{RANKS}_{RANK}").write_text(str(len(rows)))
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()
            slow_s = 0.02 * (socket.gethostname() == SLOW)


main()
