"""Move messages between ranks: receives are posted early, sends never block.

Between two ranks the transfers of a group happen in the order of the Program on both sides. What is sent is kept until
it must have arrived: the message that answers it has come, or the step is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.partition.cut import crossing_shape
from rannd.plan.schedule.program import Action
from rannd.runtime.comm.world import World
from rannd.runtime.transport.transport import Transport, as_bytes

ALIGNMENT = 64
"""Bytes: a value begins at a multiple of this."""


class Parcel:
    """Layout of a message that carries the values of some nodes for a piece of `rows` rows.

    One value travels where it is; several are copied one behind the other.
    """

    def __init__(self, nodes: Sequence[Node], rows: int) -> None:
        self.rows = rows
        self.nodes = tuple(nodes)
        self._shapes = [crossing_shape(node, rows) for node in nodes]
        self._types: list[torch.dtype] = [node.meta["val"].dtype for node in nodes]
        self._sizes = [
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(self._shapes, self._types, strict=True)
        ]
        self._starts: list[int] = []
        end = 0
        for size in self._sizes:
            self._starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.bytes = end if sum(map(bool, self._sizes)) > 1 else sum(self._sizes)
        """Bytes of the message; none is sent where there are none."""

    def pack(self, values: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
        """The message; None where there is nothing to send. StepError for a value that is not as it was traced."""
        message: torch.Tensor | None = None
        alone = sum(map(bool, self._sizes)) == 1
        for node, shape, dtype, size, start in zip(
            self.nodes, self._shapes, self._types, self._sizes, self._starts, strict=True
        ):
            value = values[node]
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise StepError(
                    f"value {node.name} is {value.dtype} {tuple(value.shape)}, but was traced as {dtype} {shape} for "
                    f"{self.rows} rows; the model gives other shapes than when it was traced, or runs under another "
                    "autocast or default dtype"
                )
            if size and alone:
                return as_bytes(value.detach())
            if size:
                if message is None:
                    message = torch.empty(self.bytes, dtype=torch.uint8, device=value.device)
                message[start : start + size].view(dtype).view(shape).copy_(value.detach())
        return message

    def unpack(self, message: torch.Tensor | None, device: torch.device) -> dict[Node, torch.Tensor]:
        """The values in a message of bytes, which share its memory."""
        values: dict[Node, torch.Tensor] = {}
        for node, shape, dtype, size, start in zip(
            self.nodes, self._shapes, self._types, self._sizes, self._starts, strict=True
        ):
            if size:
                assert message is not None
                start = 0 if self.bytes == size else start
                values[node] = message[start : start + size].view(dtype).view(shape)
            else:
                values[node] = torch.empty(shape, dtype=dtype, device=device)
        return values


UNUSED = 2
"""References to a storage that only its own tensor has, while it is looked at: the tensor's and ours."""

MOST_FREE = 8
"""Free buffers kept of each size."""


class MessageBuffers:
    """Buffers of bytes by size.

    A buffer that is given back is handed out again only if nothing else shares its memory: what a module keeps of its
    inputs (an opaque operator may keep what it likes) stays as it was.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes."""
        free = self._free.get(size)
        return free.pop() if free else self._transport.empty(size)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        free = self._free.setdefault(buffer.numel(), [])
        storage = buffer.untyped_storage()
        if len(free) < MOST_FREE and torch._C._storage_Use_Count(storage._cdata) <= UNUSED:
            self._transport.give_back(buffer)
            free.append(buffer)


class Exchange:
    """Transfers of values, or of gradients, in one step."""

    def __init__(self, world: World, buffers: MessageBuffers, *, gradients: bool) -> None:
        self._world = world
        self._transport = world.transport
        self._buffers = buffers
        self._gradients = gradients
        self._sent: dict[Action, tuple[object, torch.Tensor]] = {}
        self._arriving: dict[Action, tuple[object, Parcel, torch.Tensor | None]] = {}

    def send(self, action: Action, parcel: Parcel, values: Mapping[Node, torch.Tensor]) -> None:
        """Send the parcel's values to the slot that `action` names."""
        message = parcel.pack(values)
        if message is not None:
            peer = self._world.rank_of_slot[action.peer]
            self._sent[action] = self._transport.send(message, peer, gradients=self._gradients), message

    def post(self, action: Action, parcel: Parcel) -> None:
        """Begin to receive a parcel."""
        if not parcel.bytes:
            self._arriving[action] = None, parcel, None
            return
        buffer = self._buffers.take(parcel.bytes)
        peer = self._world.rank_of_slot[action.peer]
        self._arriving[action] = self._transport.post(buffer, peer, gradients=self._gradients), parcel, buffer

    def take(self, action: Action) -> tuple[dict[Node, torch.Tensor], torch.Tensor | None]:
        """The values of a parcel that was posted, and the buffer that they lie in. Waits for them."""
        posted, parcel, buffer = self._arriving.pop(action)
        if buffer is not None:
            self._transport.take(posted)
        return parcel.unpack(buffer, self._world.device), buffer

    def settle(self, action: Action) -> None:
        """Let go of what was sent: it is known to have arrived."""
        sent = self._sent.pop(action, None)
        if sent is not None:
            self._transport.settle(sent[0])

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for action in list(self._sent):
            self.settle(action)
