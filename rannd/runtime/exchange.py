"""Move the values of pieces between ranks.

Sends never block: their tensors are kept until the phase ends. A receive waits, except in runs of transfers at
the ends of a phase, which are posted together. Between two ranks the transfers of a group happen in the order
of the Program on both sides.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.cut import crossing_shape
from rannd.runtime.world import World

FLAG_BITS = 62
"""Flags that one number of a message holds."""

Sink = Callable[[Node, torch.Tensor], None]


class Exchange:
    """Transfers in one direction (values, or gradients) of one step."""

    def __init__(self, world: World, group: dist.ProcessGroup | None) -> None:
        self._world = world
        self._group = group
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._batch: list[dist.P2POp] = []
        self._arriving: list[tuple[Sink, Node, torch.Tensor]] = []

    def send(self, node: Node, tensor: torch.Tensor, rows: int, slot: int, *, later: bool) -> None:
        """Send a value of a piece of `rows` rows to `slot`; `later`: with the next `flush`."""
        expected = node.meta["val"]
        if tensor.dtype != expected.dtype or tuple(tensor.shape) != crossing_shape(node, rows):
            raise StepError(
                f"value {node.name} is {tensor.dtype} {tuple(tensor.shape)}, but was traced as {expected.dtype} "
                f"{crossing_shape(node, rows)} for {rows} rows; trace the model under the same autocast and default "
                "dtype as it runs"
            )
        tensor = tensor.detach().contiguous()
        if tensor.numel() == 0:
            return
        peer = self._world.rank_of_slot[slot]
        if later:
            self._batch.append(dist.P2POp(dist.isend, tensor, peer, self._group))
        else:
            self.flush()
            self._sent.append((dist.isend(tensor, peer, group=self._group), tensor))

    def receive(self, node: Node, rows: int, slot: int, sink: Sink, *, later: bool) -> None:
        """Receive a value of a piece from `slot` and give it to `sink`; `later`: with the next `flush`."""
        if not later:
            self.flush()  # what was put off comes first: the peer may wait for it
        buffer = torch.empty(crossing_shape(node, rows), dtype=node.meta["val"].dtype, device=self._world.device)
        peer = self._world.rank_of_slot[slot]
        if buffer.numel() == 0:
            sink(node, buffer)
        elif later:
            self._batch.append(dist.P2POp(dist.irecv, buffer, peer, self._group))
            self._arriving.append((sink, node, buffer))
        else:
            finish(dist.irecv(buffer, peer, group=self._group))
            sink(node, buffer)

    def flush(self) -> None:
        """Run what was put off, and hand out what arrived."""
        if self._batch:
            for work in dist.batch_isend_irecv(self._batch):
                finish(work)
        arriving, self._arriving, self._batch = self._arriving, [], []
        for sink, node, buffer in arriving:
            sink(node, buffer)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self.flush()
        sent, self._sent = self._sent, []
        for work, _ in sent:
            finish(work)


class Phase(enum.IntEnum):
    """What a rank is about to do with all others."""

    FORWARD = 1
    BACKWARD = 2


def agree(world: World, phase: Phase, step: int, first: int, second: int) -> list[tuple[int, int]]:
    """The two numbers of every rank, by rank. StepError where ranks are not at the same place of the script."""
    told = world.gather_numbers([phase, step, first, second])
    places = [(Phase(each[0]), each[1]) for each in told]
    if len(set(places)) > 1:
        other = next(rank for rank, place in enumerate(places) if place != places[0])
        raise StepError(
            f"rank 0 is in the {places[0][0].name.lower()} of call {places[0][1]}, rank {other} in the "
            f"{places[other][0].name.lower()} of call {places[other][1]}: every rank has to call the model, and "
            "backward, equally often and in the same order"
        )
    return [(each[2], each[3]) for each in told]


def pack_flags(flags: Sequence[bool]) -> tuple[int, int]:
    """Up to 124 flags as two numbers; more count as all set."""
    if len(flags) > 2 * FLAG_BITS:
        return 2**FLAG_BITS - 1, 2**FLAG_BITS - 1
    bits = sum(int(flag) << place for place, flag in enumerate(flags))
    return bits % 2**FLAG_BITS, bits >> FLAG_BITS


def unpack_flags(first: int, second: int, count: int) -> list[bool]:
    """The flags that `pack_flags` packed."""
    bits = first | second << FLAG_BITS
    return [count > 2 * FLAG_BITS or bool(bits >> place & 1) for place in range(count)]


def finish(work: dist.Work | None) -> None:
    """Wait for a transfer. torch gives none to ranks outside of the group, which is a mistake of the caller."""
    if work is None:
        raise StepError("a transfer was asked for outside of its group; please report this")
    work.wait()


def split_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """(first row, number of rows) of `parts` slices of a mini-batch, the longer ones first."""
    size, longer = divmod(rows, parts)
    counts = [size + (part < longer) for part in range(parts)]
    return [(sum(counts[:part]), counts[part]) for part in range(parts)]
