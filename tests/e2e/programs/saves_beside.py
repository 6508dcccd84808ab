"""saves_beside.py WHAT FOLDER: the saver of rank 0 waits for rank 1's, which takes long, while the scripts go on."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import pyrannc
from rannd.errors import CheckpointError, RankFailedError
from rannd.runtime.checkpoint import saving
from rannd.runtime.comm.world import made
from rannd.runtime.failure import detector

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
QUIET_S = 8.0
"""Seconds of a wait that is a hang if it counts: more than the watchdog's 2 s, and twice the time below."""
detector.ANSWER_S = 1.0

print(f"pid {os.getpid()}", flush=True)
torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
model = pyrannc.RaNNCModule(net, optimizer)
rank = pyrannc.get_rank()
world = made()
assert world is not None
write_shard, written = saving.write_shard, threading.Event()


def write_late(*args: Any) -> Any:
    if rank == 1:
        written.wait()
    return write_shard(*args)


def write_when(seen: Path) -> None:
    while not seen.exists():
        time.sleep(0.01)
    written.set()


def train() -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()


def waits(saver: threading.Thread) -> bool:
    """Whether it waits for the other rank's."""
    assert saver.ident is not None
    frame, names = sys._current_frames().get(saver.ident), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "gather_bytes" in names


train()
saving.write_shard = write_late
pending = pyrannc.save_checkpoint(FOLDER / "saved", model, optimizer, asynchronous=True)
while rank == 0 and not waits(pending._thread):
    time.sleep(0.01)

if WHAT == "watchdog":
    time.sleep(QUIET_S)  # the script computes something else
    train()
    threading.Timer(QUIET_S, written.set).start()
    pyrannc.save_checkpoint(FOLDER / "saved", model, optimizer)  # waits for the first
    print(f"rank {rank} finished", flush=True)
if WHAT == "failure":
    calls = world.watch.where.calls
    train()
    print(f"rank {rank} made {world.watch.where.calls - calls} calls", flush=True)
    seen, trained = FOLDER / "rank 0 has seen it", FOLDER / "rank 0 has trained"
    if rank == 0:
        trained.touch()
    while not trained.exists():  # a failure would reach its backward
        time.sleep(0.01)
    if rank == 1:
        threading.Thread(target=write_when, args=(seen,)).start()
        raise KeyError("the script is wrong")
    while world.watch.failure is None:
        time.sleep(0.01)
    try:
        train()
    except RankFailedError as exc:
        print(f"rank 0 caught {exc}", flush=True)
    pending._thread.join(30)
    print(f"the saver {'waits' if pending._thread.is_alive() else 'has ended'}", flush=True)
    seen.touch()
    try:
        pending.wait()
    except CheckpointError as exc:
        print(f"the saver raised {exc}", flush=True)
