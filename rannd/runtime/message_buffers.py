"""Memory for received messages, used again once nobody refers to it."""

from __future__ import annotations

import torch

UNUSED = 2
"""References to a storage that only its own tensor has, while it is looked at: the tensor's and ours."""

MOST_FREE = 8
"""Free buffers kept of each size."""


class MessageBuffers:
    """Buffers of bytes by size.

    A buffer that is given back is handed out again only if nothing else shares its memory: what a module keeps of its
    inputs (an opaque operator may keep what it likes) stays as it was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes."""
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        free = self._free.setdefault(buffer.numel(), [])
        storage = buffer.untyped_storage()
        if len(free) < MOST_FREE and torch._C._storage_Use_Count(storage._cdata) <= UNUSED:
            free.append(buffer)
