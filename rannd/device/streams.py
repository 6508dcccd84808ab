"""Waiting for devices, and work beside their computations. On the CPU everything happens at once, in order."""

from __future__ import annotations

import contextlib

import torch

from rannd.device.identity import is_accelerator


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


class Issued:
    """What a device was given up to a moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.Event | None = None

    def note(self) -> None:
        """Up to now, on the current stream."""
        if is_accelerator(self._device):
            self._event = torch.accelerator.current_stream(self._device).record_event()

    def is_outstanding(self) -> bool:
        """Whether the device has not done all of it yet; not if it has failed. Any thread may ask."""
        event = self._event
        try:
            return event is not None and not event.query()
        except RuntimeError:  # of an illegal access, say, which the thread that computes meets in its next read
            return False


class SideStream:
    """A stream of its own for transfers into buffers that computations read later.

    Memory that is allocated `inside` belongs to this stream, so that a transfer into it need not wait for computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if is_accelerator(device) else None

    def inside(self) -> contextlib.AbstractContextManager[object]:
        """Context in which operations are queued on this stream."""
        return self._stream if self._stream is not None else contextlib.nullcontext()

    def mark(self) -> torch.Event | None:
        """Mark what was queued on the current stream so far."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def wait_for(self, mark: torch.Event | None) -> None:
        """Let what this stream is given from now on wait for a mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def catch_up(self, mark: torch.Event | None) -> None:
        """Let the current stream wait for a mark of this stream, which was made `inside`."""
        if self._stream is not None and mark is not None:
            torch.accelerator.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        """Let the current stream wait for what this stream was given up to now."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._stream.record_event())

    def synchronize(self) -> None:
        """Wait until this stream has done everything it was given."""
        if self._stream is not None:
            self._stream.synchronize()

    def lend(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor of this stream, which may be freed meanwhile."""
        if self._stream is not None:
            tensor.record_stream(torch.accelerator.current_stream(self._device))
