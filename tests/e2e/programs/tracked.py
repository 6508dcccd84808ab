"""Trains two stages and tells TensorBoard, Weights & Biases (offline), a log and a function what the plan does.

usage: tracked.py FOLDER
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import pyrannc
from pyrannc.integrations.trackers import PlanMetrics

STEPS, EVERY, ROWS = 24, 8, 16
folder, rank, size = Path(sys.argv[1]), pyrannc.get_rank(), pyrannc.get_world_size()
torch.manual_seed(0)
inner = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer)

run = wandb.init(project="rannd", mode="offline", dir=folder) if rank == 0 else None
writer = SummaryWriter(folder / "board") if rank == 0 else None
logger = logging.getLogger("training")
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.setLevel(logging.INFO)
kept: dict[int, dict[str, float]] = {}
trackers = [
    PlanMetrics(model, tracker, every=EVERY)
    for tracker in (writer, run, logger, lambda found, step: kept.update({step: dict(found)}))
]
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(ROWS, 64)).pow(2).mean().backward()
    optimizer.step()
    for each in trackers:
        each.step()

if rank == 0:
    assert writer is not None
    assert run is not None
    writer.close()
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    assert list(kept) == [8, 16, 24]
    last = kept[24]
    names = {f"rannd/{kind}_mib/rank{each}" for kind in ("memory", "planned") for each in range(size)}
    assert set(board.Tags()["scalars"]) == last.keys() > names
    assert [each.step for each in board.Scalars("rannd/call_ms")] == [8, 16, 24]
    assert run.summary["rannd/measured_step_ms"] == last["rannd/measured_step_ms"] > 0
    run.finish()
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    deployment = model.deployment
    assert last["rannd/predicted_step_ms"] == deployment.step_us / 1e3
    assert last["rannd/samples_per_s"] * last["rannd/call_ms"] / 1e3 - ROWS * size < 1e-6
    assert 0 < last["rannd/predicted_bubble"] < 1
    assert 0 < last["rannd/measured_bubble"] < 1
    assert all(last[f"rannd/memory_mib/rank{each}"] > 50 for each in range(size)), "a process with torch has more"
print(f"tracked on rank {rank}", flush=True)
