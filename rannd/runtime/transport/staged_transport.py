"""Transfers of GPU tensors through the host's memory and gloo: for ranks that share a GPU, which NCCL refuses.

Each message is copied to pinned memory, for which the host waits, and back. That is slow; it is there to check that a
plan of several stages is right on a machine with one GPU.
"""

from __future__ import annotations

import torch

from rannd.device.identity import is_accelerator
from rannd.runtime.transport.gloo_transport import GlooTransport
from rannd.runtime.transport.transport import finish


class StagedTransport(GlooTransport):
    """gloo with copies of the messages in the host's memory."""

    name = "staged"
    reads_late = True
    shares_devices = True

    def send(self, message: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Copy a message to the host, and send the copy."""
        copy = self._staging(message.numel())
        copy.copy_(message)  # waits for the computations before it
        return super().send(copy, peer, gradients=gradients), copy

    def post(self, buffer: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Start to receive into the host's memory."""
        copy = self._staging(buffer.numel())
        return super().post(copy, peer, gradients=gradients), copy, buffer

    def take(self, posted: object) -> None:
        """Wait for a message, and copy it to the device."""
        assert isinstance(posted, tuple)
        work, copy, buffer = posted
        finish(work)
        buffer.copy_(copy)

    def settle(self, sent: object) -> None:
        """Wait until the copy has been sent."""
        assert isinstance(sent, tuple)
        finish(sent[0])

    def _staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(self.device))
