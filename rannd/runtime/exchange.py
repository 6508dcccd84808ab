"""Move messages between ranks: receives are posted early, sends never block.

Between two ranks the transfers of a group happen in the order of the Program on both sides. What is sent is kept until
it must have arrived: the message that answers it has come, or the step is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.errors import StepError
from rannd.plan.program import Action
from rannd.runtime.message_buffers import MessageBuffers
from rannd.runtime.parcels import Parcel
from rannd.runtime.world import World


class Exchange:
    """Transfers of one group in one step."""

    def __init__(self, world: World, group: dist.ProcessGroup | None, buffers: MessageBuffers) -> None:
        self._world = world
        self._group = group
        self._buffers = buffers
        self._sent: dict[Action, tuple[dist.Work | None, torch.Tensor]] = {}
        self._arriving: dict[Action, tuple[dist.Work | None, Parcel, torch.Tensor | None]] = {}

    def send(self, action: Action, parcel: Parcel, values: Mapping[Node, torch.Tensor]) -> None:
        """Send the parcel's values to the slot that `action` names."""
        message = parcel.pack(values)
        if message is not None:
            peer = self._world.rank_of_slot[action.peer]
            self._sent[action] = dist.isend(message, peer, group=self._group), message

    def post(self, action: Action, parcel: Parcel) -> None:
        """Begin to receive a parcel."""
        if not parcel.bytes:
            self._arriving[action] = None, parcel, None
            return
        buffer = self._buffers.take(parcel.bytes)
        peer = self._world.rank_of_slot[action.peer]
        self._arriving[action] = dist.irecv(buffer, peer, group=self._group), parcel, buffer

    def take(self, action: Action) -> tuple[dict[Node, torch.Tensor], torch.Tensor | None]:
        """The values of a parcel that was posted, and the buffer that they lie in. Waits for them."""
        work, parcel, buffer = self._arriving.pop(action)
        if buffer is not None:
            finish(work)
        return parcel.unpack(buffer, self._world.device), buffer

    def settle(self, action: Action) -> None:
        """Let go of what was sent: it is known to have arrived."""
        sent = self._sent.pop(action, None)
        if sent is not None:
            finish(sent[0])

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for action in list(self._sent):
            self.settle(action)


def finish(work: dist.Work | None) -> None:
    """Wait for a transfer. torch gives none to ranks outside of the group, which is a mistake of the caller."""
    if work is None:
        raise StepError("a transfer was asked for outside of its group; please report this")
    work.wait()
