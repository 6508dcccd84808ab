"""Copies of the ranks' parts in the memory of other hosts, sent beside the training."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from rannd.ranks import memory_files
from rannd.ranks.memory_files import MAGIC
from rannd.runtime.comm.world import World

KEEPING = "copies of steps"
"""What the thread that sends them does, for messages."""
_CHUNK = 32 << 20
"""Bytes of a message."""


def keepers(nodes: Sequence[int]) -> list[int | None]:
    """Return for each rank another one that keeps a copy of its part; None where there is one node alone.

    It is on the next node, so that the ranks of a node are spread over those of another one. `nodes`: of the ranks.
    """
    names = sorted(set(nodes))
    ranks = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in names}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        place, at = ranks[node].index(rank), names.index(node)
        others = [other for name in (*names[at + 1 :], *names[:at]) for other in ranks[name]]
        found.append(others[place % len(others)] if others else None)
    return found


class Neighbours:
    """Sends this rank's parts to the rank that keeps copies of them, and takes those that it keeps. Collective.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        chosen = keepers([world.slots[world.rank_of_slot.index(rank)].node for rank in range(world.size)])
        self._world = world
        self._keeper = chosen[world.rank]
        self._sources = [rank for rank, keeper in enumerate(chosen) if keeper == world.rank]
        self.exist = self._keeper is not None
        """Whether there are several hosts."""
        self._other = world.beside(KEEPING) if self.exist else world
        self._thread: threading.Thread | None = None
        self.error = ""
        """Why a copy could not be kept, here or by the keeper."""

    def done(self) -> bool:
        """Whether the copies that were begun last have arrived, here and at the keeper."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait until `done`."""
        if self._thread is not None:
            self._thread.join()

    def begin(self, own: int, copies: int) -> None:
        """Send the record in the file in memory `own`, and take others into the file `copies`, in a thread.

        Neither file may change until `done` says so. A failed rank fails the job, as everywhere.
        """
        if not self.exist:
            return
        self._thread = threading.Thread(target=self._run, args=(own, copies), name="rannd copies")
        self._thread.start()

    def _run(self, own: int, copies: int) -> None:
        # The detector has the error of a failed rank, and tells it wherever the script waits next.
        with suppress(Exception), self._world.watch.beside(KEEPING):
            self._exchange(own, copies)

    def _exchange(self, own: int, copies: int) -> None:
        length = os.fstat(own).st_size
        incoming = [torch.zeros(1, dtype=torch.int64) for _ in self._sources]
        self._send_and_take([torch.tensor([length])], [[each] for each in incoming])
        sizes = [int(each) for each in incoming]
        able = torch.tensor([int(self._reserve(copies, sum(sizes)))])
        answer = torch.zeros(1, dtype=torch.int64)
        works = [dist.irecv(answer, self._keeper, group=self._other.control)]
        works += [dist.isend(able, source, group=self._other.control) for source in self._sources]
        _wait(works)
        if not int(answer):
            self.error = self.error or f"rank {self._keeper} on {self._world.hosts[self._keeper or 0]} has no memory"
        places = [sum(sizes[:number]) for number in range(len(sizes))]
        # A record says that it is whole when all of it has arrived: the first bytes are not sent.
        mine = _chunks(own, len(MAGIC), length) if int(answer) else []
        theirs: list[list[torch.Tensor]] = [[] for _ in sizes]
        if int(able):
            for place in (place for place, size in zip(places, sizes, strict=True) if size):
                memory_files.spoil(copies, place)
            theirs = [
                _chunks(copies, place + len(MAGIC), place + size) for place, size in zip(places, sizes, strict=True)
            ]
        self._send_and_take(mine, theirs)
        if int(able):
            for place in (place for place, size in zip(places, sizes, strict=True) if size):
                memory_files.set_whole(copies, place)

    def _send_and_take(self, mine: Sequence[torch.Tensor], theirs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Send tensors to the keeper, and take others of each source, one of each at a time."""
        for sent, *taken in zip_longest(mine, *theirs):
            works: list[Any] = [
                dist.irecv(each, source, group=self._other.control)
                for each, source in zip(taken, self._sources, strict=True)
                if each is not None
            ]
            if sent is not None:
                works.append(dist.isend(sent, self._keeper, group=self._other.control))
            _wait(works)

    def _reserve(self, copies: int, size: int) -> bool:
        """Make room for the copies; a file in memory that grows while it is written to ends the process."""
        try:
            memory_files.spoil(copies)
            os.ftruncate(copies, size)
            if size:
                os.posix_fallocate(copies, 0, size)
        except OSError as exc:
            self.error = f"rank {self._world.rank} on {self._world.hosts[self._world.rank]}: {exc.strerror}"
            with suppress(OSError):
                os.ftruncate(copies, 0)
            return False
        return True


def _chunks(file: int, begin: int, end: int) -> list[torch.Tensor]:
    """Bytes of a file in memory as tensors, which share it."""
    if begin >= end:
        return []  # a rank that cannot keep its part has an empty file
    mapped = mmap.mmap(file, end)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return [whole[place : min(place + _CHUNK, end)] for place in range(begin, end, _CHUNK)]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
