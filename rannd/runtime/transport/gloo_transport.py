"""Transfers of CPU tensors over gloo, whose threads move them while the rank computes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rannd.runtime.transport.transport import Transport, finish


class GlooTransport(Transport):
    """gloo: a posted receive holds up nothing, and groups connect all pairs when they are made.

    Args:
        device: The CPU.
        values: Group of all ranks for values; None for a single rank.
        gradients: Group of all ranks for gradients, whose order is independent of the values'.
    """

    name = "gloo"
    backend = "gloo"

    def __init__(
        self, device: torch.device, values: dist.ProcessGroup | None, gradients: dist.ProcessGroup | None
    ) -> None:
        super().__init__(device)
        self.groups = values, gradients

    def send(self, message: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Start to send."""
        return dist.isend(message, peer, group=self.groups[gradients])

    def post(self, buffer: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Start to receive."""
        return dist.irecv(buffer, peer, group=self.groups[gradients])

    def take(self, posted: object) -> None:
        """Wait for a message."""
        finish(posted)

    def settle(self, sent: object) -> None:
        """Wait until a message has been sent."""
        finish(sent)
