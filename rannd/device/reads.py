"""The only reads of a device: the host waits for values, and counts how often.

A read makes the host wait until the device has computed everything before it, and then the device wait for the host. In
a steady step nothing but `LateReads` reads: once, and what the step before has computed, while the device has the next
step to work on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rannd.device.identity import is_accelerator

Use = Callable[[Sequence[float]], None]
"""Takes the values of a tensor, flattened; may raise."""

_count = 0


def count() -> int:
    """How often this process has read a device so far, the CPU included, where a read waits for nothing."""
    return _count


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor's values, and return them on the CPU: the tensor itself if it is there."""
    global _count
    _count += 1
    return tensor.detach().to("cpu")


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; a read if it has to leave its own for the CPU."""
    return tensor.to(device) if device.type != "cpu" or tensor.device == device else read(tensor)


class LateReads:
    """Values that a step computes, and the host uses one step later.

    Args:
        device: Where they are.
        late: Whether they are used late. Where the host waits for each operator anyway (the CPU), they are used at
            once.
        ensure_intact: Raises if the values may be garbage, because a transfer before them was aborted.
    """

    def __init__(self, device: torch.device, *, late: bool, ensure_intact: Callable[[], None] | None = None) -> None:
        self.late = late
        self._ensure_intact = ensure_intact
        self._device = device
        self._added: list[tuple[torch.Tensor, Use]] = []
        self._copied: tuple[torch.Tensor, torch.Event | None, list[tuple[int, Use]]] | None = None

    def add(self, values: torch.Tensor, use: Use) -> None:
        """Have `use` called with values of a tensor, as float64."""
        if not self.late:
            use(read(values).double().reshape(-1).tolist())
            return
        # A copy: the script may write into its own tensors before the values are used.
        self._added.append((values.detach().to(torch.float64, copy=True).reshape(-1), use))

    def begin(self) -> None:
        """At the beginning of a step: start to copy what was added since the last one; the host does not wait."""
        if not self._added:
            return
        self.end()
        added, self._added = self._added, []
        values = torch.cat([value for value, _ in added])
        queued = is_accelerator(self._device)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=queued)
        host.copy_(values, non_blocking=queued)
        event = torch.accelerator.current_stream(self._device).record_event() if queued else None
        self._copied = host, event, [(value.numel(), use) for value, use in added]

    def end(self) -> None:
        """At the end of a step, which the device is given by now: wait for the copy, and use its values.

        If one of them raises, everything else is forgotten: the script gets no results of this step.
        """
        if self._copied is None:
            return
        global _count
        (host, event, uses), self._copied = self._copied, None
        _count += 1
        try:
            if event is not None:
                event.synchronize()
            if self._ensure_intact is not None:
                self._ensure_intact()
            numbers = iter(host.tolist())
            for size, use in uses:
                use([next(numbers) for _ in range(size)])
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop everything that was added."""
        self._added, self._copied = [], None

    def settle(self) -> None:
        """Use everything that was added: before what has been computed is kept, or left."""
        self.end()
        self.begin()
        self.end()
