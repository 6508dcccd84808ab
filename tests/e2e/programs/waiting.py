"""waiting.py WHAT FOLDER: rank 0 waits for rank 1, which does WHAT until rank 0 has told so; then both go on.

`state_dict`: rank 1 is in the script; `connect`: rank 1 makes its RaNNCModule late; `tracing`: rank 0's first call is
slow, and rank 1 waits; `ended`: rank 1 has ended its script.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
from torch import nn
from yardstick import RANK

import pyrannc

WHAT = sys.argv[1]
TOLD = Path(sys.argv[2]) / "told"


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "waits for" in text and (WHAT == "connect" or _here() in text or "ended" in text):
            TOLD.touch()


def until_told() -> None:
    while not TOLD.exists(): time.sleep(0.05)  # fmt: skip  # noqa: E701 - one line, which is what is told
    time.sleep(3.0)  # for three more lines, if there were any


def _here() -> str:
    """Where `until_told` waits."""
    return f"waiting.py:{until_told.__code__.co_firstlineno + 1}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if WHAT == "tracing" and RANK == 0 and not TOLD.exists():
            until_told()
        return self.layers(x).pow(2).sum()


logging.getLogger("rannd.RaNNCProcess").addHandler(Told())
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if WHAT == "connect" and RANK == 1:
    until_told()
model = pyrannc.RaNNCModule(net, optimizer)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).backward()
    optimizer.step()
if WHAT == "state_dict" and RANK == 1:
    until_told()
if RANK == 0 or WHAT != "ended":
    state = model.state_dict()
print("saved", flush=True)
