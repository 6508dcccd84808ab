"""What is elsewhere, in pinned host memory: for ranks with a GPU, which copy it to the device and back.

Copies are on a stream of their own, beside computations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rannd.device.streams import SideStream
from rannd.runtime.zero.state_home import VALUES, Place, StateHome, dense_stride, tensors_in

MOST_LEAVING = 2
"""Values that may be on their way to the host's memory at a time."""


class HostMemory(StateHome):
    """State in the host's memory, copied to a device for a step, and back.

    `pinned`: the copies go on beside computations.
    """

    in_place = False

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        super().__init__()
        self._device, self._pinned = device, pinned
        self._stream = SideStream(device)
        self._coming: dict[Place, torch.Tensor] = {}
        self._leaving: deque[tuple[torch.Event | None, torch.Tensor]] = deque()
        """What is being laid, with the end of its copy. Computations wait for it before its memory is used again: with
        `record_stream` the allocator would not know of the end while the host queues kernels, and take more memory."""
        self._returning: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of what was laid: this, which keeps its identity from being another's, and its copy."""

    def ahead(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        def come(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            if place not in self._coming and self._is_home(place, tensor):
                self._coming[place] = tensor.to(self._device, non_blocking=self._pinned, copy=True)
            return tensor

        with self._stream.inside():
            for name, state in zip(names, states, strict=True):
                self._each(name, state, come)

    def bring(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        self.ahead(names, states)
        self._stream.join()
        for name, state in zip(names, states, strict=True):
            self._each(name, state, lambda place, tensor: self._coming.pop(place, tensor))
            for value in state.values():
                for tensor in tensors_in(value):
                    if tensor.device == self._device:
                        self._stream.lend(tensor)

    def leave(self, names: Sequence[str]) -> None:
        pass

    def drop(self, name: str) -> None:
        self._coming.pop(Place(name, VALUES, 0), None)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        home = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=self._pinned)
        home = home.as_strided(tensor.shape, dense_stride(tensor))
        self._stream.wait_for(self._stream.mark())
        with self._stream.inside():
            home.copy_(tensor.detach(), non_blocking=self._pinned)
            self._leaving.append((self._stream.mark(), tensor))
        while len(self._leaving) > MOST_LEAVING:
            self._stream.catch_up(self._leaving.popleft()[0])
        return home

    def coming(self, laid: Iterable[torch.Tensor]) -> None:
        new = [home for home in laid if id(home) not in self._returning]
        # Of the stream that computes, so that its memory is free as soon as it is let go of.
        copies = [torch.empty_like(home, device=self._device, requires_grad=False) for home in new]
        self._stream.wait_for(self._stream.mark())
        with self._stream.inside(), torch.no_grad():
            for home, copy in zip(new, copies, strict=True):
                copy.copy_(home, non_blocking=self._pinned)
                self._returning[id(home)] = home, copy

    def back(self, laid: torch.Tensor) -> torch.Tensor:
        self.coming([laid])
        self._stream.join()
        _, found = self._returning.pop(id(laid))
        return found

    def forget(self) -> None:
        self._stream.join()
        self._leaving.clear()
        self._returning.clear()

    def finish(self) -> None:
        self._coming.clear()
        self._stream.synchronize()

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)

    def _store(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        self._stream.wait_for(self._stream.mark())  # until it was stepped
        with self._stream.inside():
            home.copy_(tensor, non_blocking=self._pinned)
            self._stream.lend(tensor)

    def _back(self, home: torch.Tensor) -> torch.Tensor:
        return home.to(self._device, copy=True)
