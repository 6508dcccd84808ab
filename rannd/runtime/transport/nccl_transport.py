"""Transfers between GPUs over NCCL.

Each pair of ranks has a communicator, and so a stream, for values and one for gradients, so that transfers of different
pairs do not wait for each other. torch makes a communicator at the first operation, for which the hosts of both ranks
meet; here this happens before a step, in one order on all ranks. Receives are issued from a stream of their own: they
need not wait for the computations before them.

Source: ProcessGroupNCCL of torch (send and receive of a group without a bound device use a communicator per pair).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rannd.device.streams import SideStream, synchronize
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.stream_checker import StreamRules, Streams
from rannd.runtime.transport.transport import MakeGroup, Pair, Transport, finish, pair


class NcclTransport(Transport):
    """NCCL: a transfer is a kernel on both devices, which holds up what comes later on its stream.

    Args:
        device: This rank's GPU.
        rank: This rank.
        make_group: Makes process groups.
    """

    name = "nccl"
    reads_late = True
    backend = "nccl"
    posting = Posting.MATCHED
    rules = StreamRules(Streams.PAIR)

    def __init__(self, device: torch.device, rank: int, make_group: MakeGroup) -> None:
        super().__init__(device)
        self._rank = rank
        self._make_group = make_group
        self._groups: dict[Pair, dist.ProcessGroup | None] = {}
        self._side = SideStream(device)
        self._last_use: dict[int, torch.Event | None] = {}
        """By address: after it, a buffer is free."""

    def open(self, pairs: Iterable[Pair]) -> int:
        """Make the groups, then the communicators, in the order of pairs: no rank waits for one that is not there."""
        new = sorted(set(pairs) - self._groups.keys())
        for each in new:
            self._groups[each] = self._make_group(self.backend, each[1:])
        for each in new:
            if self._rank in each[1:]:
                self._meet(each)
        if new:
            synchronize(self.device)
        return len(new)

    def _meet(self, ranks: Pair) -> None:
        """Send one byte from the lower rank to the higher one."""
        _, low, high = ranks
        message = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self._rank == low:
            dist.send(message, high, group=self._groups[ranks])
        else:
            dist.recv(message, low, group=self._groups[ranks])

    def empty(self, size: int) -> torch.Tensor:
        """A buffer in the memory of the stream of receives."""
        with self._side.inside():
            return super().empty(size)

    def give_back(self, buffer: torch.Tensor) -> None:
        """The next receive into the buffer waits for what the device was given so far."""
        self._last_use[buffer.data_ptr()] = self._side.mark()

    def send(self, message: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Queue a send behind the computations that were issued so far."""
        return dist.isend(message, peer, group=self._group(peer, gradients=gradients))

    def post(self, buffer: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Queue a receive behind the last use of its buffer."""
        self._side.wait_for(self._last_use.pop(buffer.data_ptr(), None))
        with self._side.inside():
            return buffer, dist.irecv(buffer, peer, group=self._group(peer, gradients=gradients))

    def take(self, posted: object) -> None:
        """Let the stream of computations wait for a message; the host goes on."""
        assert isinstance(posted, tuple)
        buffer, work = posted
        finish(work)
        self._side.lend(buffer)

    def settle(self, sent: object) -> None:
        """Let the stream of computations wait for the end of a send; the host goes on."""
        finish(sent)

    def _group(self, peer: int, *, gradients: bool) -> dist.ProcessGroup | None:
        return self._groups[pair(gradients, self._rank, peer)]
