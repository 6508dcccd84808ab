"""last_save.py WHAT FOLDER: the last asynchronous save of a training fails, as on a full disk; WHAT comes after it."""

from __future__ import annotations

import atexit
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pyrannc
from rannd.errors import CheckpointError
from rannd.runtime.checkpoint import saving

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])

torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
model = pyrannc.RaNNCModule(net, optimizer)
rank = pyrannc.get_rank()


def train(step: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    print(f"rank {rank} step {step} done", flush=True)


train(0)
sys.dont_write_bytecode = True  # a file of bytecode that is cut off would break later imports
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))  # writes fail, as where a quota or a disk is full
write = saving._write


def write_and_stay(*args: Any) -> None:
    try:
        write(*args)
    finally:
        time.sleep(1)


late = WHAT == "call" and rank == 1
if late:  # this rank calls the model before it knows
    saving._write = write_and_stay
pending = pyrannc.save_checkpoint(FOLDER / "last", model, optimizer, asynchronous=True)
while not (late or pending.done()):
    time.sleep(0.01)

if WHAT in ("call", "barrier"):
    try:
        if WHAT == "call":
            train(1)
        else:
            pyrannc.barrier()
    except CheckpointError as exc:
        print(f"rank {rank} caught {exc}", flush=True)
    train(2)  # the ranks are in sync
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    pyrannc.save_checkpoint(FOLDER / "last", model, optimizer, asynchronous=True)
if WHAT == "error":
    raise KeyError("the script is wrong")
if WHAT == "exit":
    sys.exit(0)
if WHAT == "end":
    last = FOLDER / "rank 1 has ended"
    if rank == 1:
        atexit.register(last.touch)
    else:
        atexit.register(lambda: print("handlers run", flush=True))
        while not last.exists():
            time.sleep(0.01)
        time.sleep(3)  # in which rannc-run would end this rank, if rank 1 had failed already
        print("rank 0 has done the rest", flush=True)
if WHAT == "once more":
    if rank == 0:
        atexit.register((FOLDER / "rank 0 ends").touch)
    else:
        while not (FOLDER / "rank 0 ends").exists():
            time.sleep(0.01)
        pyrannc.barrier()
