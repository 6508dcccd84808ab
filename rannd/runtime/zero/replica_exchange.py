"""Sums and gathers flat buffers among the replicas of a stage, each of which owns one range of them.

On GPUs these are NCCL's reduce-scatter and all-gather. Over gloo every replica sends each other one its range at once:
gloo's own reduce-scatter takes twice as long as its all-reduce (docs/architecture.md has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rannd.device.reads import moved
from rannd.runtime.comm.world import World
from rannd.runtime.transport.transport import finish

# torch 2.13 has renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_CPU = torch.device("cpu")
_SUM, _GATHER = 11, 12
"""Tags of gloo's messages."""


@dataclass
class PendingSum:
    """A sum that is on its way."""

    works: list[object]
    parts: list[torch.Tensor]
    """What each replica has given; of one element: the sum."""
    own: int
    """Which of them is this replica's."""
    home: torch.device
    source: torch.Tensor
    """The buffer, which has to stay until all was sent."""

    def wait(self) -> torch.Tensor:
        """This rank's range of the sum, on the device; replicas are added in their order.

        The sum is where another's part was received, so that it needs no other memory.
        """
        for work in self.works:
            finish(work)
        if len(self.parts) == 1:
            return self.parts[0].to(self.home)
        first, second, *others = self.parts
        total = second.add_(first) if self.own == 0 else first.add_(second)
        for part in others:
            total += part
        return total.to(self.home)


@dataclass
class PendingGather:
    """Ranges that are on their way into a buffer."""

    works: list[object]
    flat: torch.Tensor
    host: torch.Tensor | None
    """A copy of the buffer on the CPU, where the backend needs one."""

    def wait(self) -> None:
        """Wait until the buffer has all ranges."""
        for work in self.works:
            finish(work)
        if self.host is not None:
            self.flat.copy_(self.host)


class ReplicaExchange:
    """Exchanges among the replicas of this rank's stage. All have to begin the same ones, in the same order.

    Args:
        world: The ranks of the job.
        slots: The replicas.
    """

    def __init__(self, world: World, slots: Sequence[int]) -> None:
        self._ranks = sorted(world.rank_of_slot[slot] for slot in slots)
        self.replica = self._ranks.index(world.rank)
        """This rank's number among the replicas."""
        self.replicas = len(self._ranks)
        order = [(self.replica + step) % self.replicas for step in range(1, self.replicas)]
        self._others = [(number, self._ranks[number]) for number in order]
        """(number, rank) of the other replicas, the next one first, so that not all send to the same."""
        self.device = world.device
        self._group = world.group_of(tuple(slots))
        self.uneven = world.transport.backend == "gloo"
        """Whether the last ranges of what is gathered may be shorter, or empty: replicas send each other theirs."""

    def sum(self, flat: torch.Tensor) -> PendingSum:
        """Begin to sum up buffers of the same size, a multiple of `replicas`; each replica gets its range of the sum.

        The buffer belongs to the exchange until `wait` returns.
        """
        length = flat.numel() // self.replicas
        if self.replicas == 1:
            return PendingSum([], [flat], 0, flat.device, flat)
        if not self.uneven:
            mine = flat.new_empty(length)
            return PendingSum(
                [_reduce_scatter(mine, flat, group=self._group, async_op=True)], [mine], 0, flat.device, flat
            )
        host = flat if flat.device.type == "cpu" else moved(flat, _CPU)
        parts = list(host.split_with_sizes([length] * self.replicas))
        works: list[object] = []
        for number, rank in self._others:
            works.append(dist.isend(parts[number], rank, group=self._group, tag=_SUM))
            parts[number] = torch.empty_like(parts[number])
            works.append(dist.irecv(parts[number], rank, group=self._group, tag=_SUM))
        return PendingSum(works, parts, self.replica, flat.device, host)

    def gather(self, flat: torch.Tensor, length: int) -> PendingGather:
        """Begin to fill a buffer, of which each replica has its range of `length` elements, with the others' ranges.

        Its size is `replicas` times `length`, or less where ranges may be `uneven`.
        """
        if self.replicas == 1:
            return PendingGather([], flat, None)
        if not self.uneven:
            mine = flat.split(length)[self.replica]
            return PendingGather([_all_gather(flat, mine, group=self._group, async_op=True)], flat, None)
        host = None if flat.device.type == "cpu" else moved(flat, _CPU)
        parts = (flat if host is None else host).split(length)
        works: list[object] = []
        for number, rank in self._others:
            if self.replica < len(parts):
                works.append(dist.isend(parts[self.replica], rank, group=self._group, tag=_GATHER))
            if number < len(parts):
                works.append(dist.irecv(parts[number], rank, group=self._group, tag=_GATHER))
        return PendingGather(works, flat, host)

    def largest_(self, numbers: torch.Tensor) -> None:
        """Replace numbers by the largest of all replicas."""
        if self.replicas > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
