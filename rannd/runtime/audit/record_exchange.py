"""Rank 0 asks the other ranks for what they kept of a step: one request, one answer, until it says that it is done.

A request is a key in MessagePack; an answer is a table (name, dtype, shape) and the bytes of the tensors behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist

from rannd.runtime.audit.step_record import Key
from rannd.runtime.comm.world import World

Tensors: TypeAlias = dict[str, torch.Tensor]

_KEYS = msgspec.msgpack.Decoder(tuple[str | int, ...])
_TABLE = msgspec.msgpack.Decoder(list[tuple[str, str, tuple[int, ...]]])
_DONE: Key = ("done",)


class RecordExchange:
    """Requests and answers between rank 0 and the others, on the group for small messages."""

    def __init__(self, world: World, find: Callable[[Key], Tensors]) -> None:
        self._world = world
        self._find = find

    def ask(self, rank: int, *key: str | int) -> Tensors:
        """What a rank kept under a key, on rank 0."""
        if rank == self._world.rank:
            return dict(self._find(key))
        self._send(msgspec.msgpack.encode(key), rank)
        table = _TABLE.decode(self._receive(rank).numpy().tobytes())
        found: Tensors = {}
        for name, dtype, shape in table:
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            if value.numel():
                dist.recv(value.view(-1).view(torch.uint8), rank, group=self._world.control)
            found[name] = value
        return found

    def done(self) -> None:
        """Rank 0 asks for nothing more."""
        for rank in range(1, self._world.size):
            self._send(msgspec.msgpack.encode(_DONE), rank)

    def serve(self) -> None:
        """Answer rank 0 until it is done."""
        while (key := _KEYS.decode(self._receive(0).numpy().tobytes())) != _DONE:
            found = self._find(key)
            table = [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in found.items()]
            self._send(msgspec.msgpack.encode(table), 0)
            for each in found.values():
                if each.numel():
                    dist.send(each.view(-1).view(torch.uint8), 0, group=self._world.control)

    def _send(self, data: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(data)]), rank, group=self._world.control)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self._world.control)

    def _receive(self, rank: int) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._world.control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, rank, group=self._world.control)
        return data
