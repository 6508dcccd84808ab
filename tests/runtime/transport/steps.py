"""Plays the instructions of a Program on real ranks: every message has contents of its own, which are checked."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rannd.plan.schedule.instructions import instructions
from rannd.plan.schedule.program import TRANSFERS, Action, ActionKind, Program
from rannd.runtime.deployment.connecting import pairs_of
from rannd.runtime.transport.transport import Transport

GRADS = frozenset({ActionKind.SEND_GRADS, ActionKind.RECV_GRADS})
CPU = torch.device("cpu")
Maker = Callable[[int, dist.ProcessGroup, dist.ProcessGroup], Transport]
"""Makes the transport of a rank from the groups for values and gradients."""


def contents(action: Action, sender: int, receiver: int) -> torch.Tensor:
    """Bytes of a message: their number and values depend on everything that tells it from others."""
    seed = hash((action.kind in GRADS, action.src, action.dst, action.piece, sender, receiver)) & 0xFFFF
    return torch.randint(0, 255, (1 + seed % 5000,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def play(transport: Transport, program: Program, rank: int) -> None:
    """One step of a slot, which is the rank of the same number."""
    transport.open(pairs_of(program))
    for slots in program.phases:
        sent: dict[Action, object] = {}
        posted: dict[Action, tuple[object, torch.Tensor]] = {}
        for each in instructions(slots, rank, transport.posting):
            for action in each.posts:
                buffer = transport.empty(contents(action, action.peer, rank).numel())
                posted[action] = transport.post(buffer, action.peer, gradients=action.kind in GRADS), buffer
            for action in each.awaits:
                handle, buffer = posted.pop(action)
                transport.take(handle)
                assert torch.equal(buffer, contents(action, action.peer, rank)), f"rank {rank}: {action}"
                transport.give_back(buffer)
            for action in each.settles:
                transport.settle(sent.pop(action))
            if each.action is not None and each.action.kind in TRANSFERS:
                message = contents(each.action, rank, each.action.peer)
                sent[each.action] = transport.send(message, each.action.peer, gradients=each.action.kind in GRADS)
            elif each.action is not None:
                transport.before_computation()
        for handle in sent.values():
            transport.settle(handle)
        assert not posted


def _rank(rank: int, folder: str, makers: list[Maker], programs: list[Program]) -> None:
    torch.set_num_threads(1)
    size = programs[0].layout.world
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=5))
    try:
        for maker in makers:
            values, gradients = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
            transport = maker(rank, values, gradients)
            for program in programs:
                play(transport, program, rank)
        dist.barrier()
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(0)  # other ranks may wait for ever
    Path(folder, f"done{rank}").touch()
    dist.destroy_process_group()


def run(folder: Path, makers: list[Maker], programs: list[Program]) -> dict[int, str]:
    """Play programs, all of one number of slots, on as many ranks; returns errors by rank."""
    size = programs[0].layout.world
    mp.spawn(_rank, (str(folder), makers, programs), nprocs=size)
    errors = {rank: folder / f"error{rank}" for rank in range(size)}
    assert all(file.exists() or (folder / f"done{rank}").exists() for rank, file in errors.items())
    return {rank: file.read_text() for rank, file in errors.items() if file.exists()}
