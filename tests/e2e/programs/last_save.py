"""last_save.py WHAT FOLDER: the last asynchronous save of a training fails, as on a full disk; WHAT comes after it.

`broken` and `gone`: not the disk fails, but a connection between the savers, or rank 1 as a whole; `memory`: rank 1
cannot copy its values, and all save again.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import pyrannc
from rannd.errors import CheckpointError
from rannd.runtime.checkpoint import saving
from rannd.runtime.checkpoint.content import Content
from rannd.runtime.comm.world import World

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
if WHAT == "broken":
    gather_bytes = World.gather_bytes

    def gather_or_break(world: World, data: bytes) -> list[bytes]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Connection closed by peer")
        return gather_bytes(world, data)

    World.gather_bytes = gather_or_break  # type: ignore[method-assign]
if WHAT == "gone":
    write_shard = saving.write_shard

    def write_late(*args: Any) -> Any:
        while rank == 0 and not (FOLDER / "rank 1 has ended").exists():
            time.sleep(0.01)
        return write_shard(*args)

    saving.write_shard = write_late
if WHAT in ("broken", "gone"):
    pyrannc.save_checkpoint(FOLDER / "last", model, optimizer, asynchronous=True)
    if rank == 1 and WHAT == "gone":
        (FOLDER / "rank 1 has ended").touch()
        os._exit(0)
    sys.exit()
if WHAT == "memory":
    snapshot = Content.snapshot

    def too_much(content: Content) -> None:
        raise MemoryError("no more")

    if rank == 1:
        Content.snapshot = too_much  # type: ignore[method-assign]
    try:
        pyrannc.save_checkpoint(FOLDER / "first", model, optimizer, asynchronous=True)
    except (CheckpointError, MemoryError) as exc:
        print(f"rank {rank} caught {exc}", flush=True)
    Content.snapshot = snapshot  # type: ignore[method-assign]
    pyrannc.save_checkpoint(FOLDER / "last", model, optimizer, asynchronous=True)
    train(2)
    sys.exit()
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

if WHAT == "waited" and rank == 0:
    try:
        pending.wait()
    except CheckpointError:
        print("rank 0 has seen it", flush=True)
if WHAT in ("call", "barrier", "waited"):
    try:
        if WHAT == "call":
            train(1)
        elif WHAT == "waited":
            pyrannc.save_checkpoint(FOLDER / "next", model, optimizer)
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
