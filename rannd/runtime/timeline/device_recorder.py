"""Records by events of an accelerator's stream, which nobody waits for: they are read once the device has passed them.

The clocks of host and device are joined where a step begins: the device is there when the host is, or later. So the
latest the device's clock can be behind is what the least late of all steps says::

    host     |0.........|100.......|200.....
    device     |2.........|101......|203....      begins of steps; the device's clock is taken to be 1 ahead
"""

from __future__ import annotations

from collections import deque

import torch

from rannd.device.action_clock import mark
from rannd.plan.schedule.program import Action
from rannd.runtime.timeline.host_recorder import HostRecorder
from rannd.runtime.timeline.recorder import OF_HOST, Doing, Mark, StepRow


class DeviceRecorder(HostRecorder):
    """Records what the current stream of `device` does; waits of the stream are in it."""

    def __init__(self, device: torch.device, *, full: bool) -> None:
        super().__init__(full=full)
        self._device = device
        self._issued: deque[tuple[StepRow, Doing, int, int, Action | None, torch.Event, torch.Event]] = deque()
        """What the device may not have done yet, in the order in which it ends."""
        self._bases: deque[tuple[StepRow, torch.Event]] = deque()
        """Begins of steps that the device may not have passed, after that of `_base`."""
        self._base: torch.Event | None = None
        self._base_ns = 0
        """When it was, on the device's clock, which begins with the first step."""
        self._ahead_ns: int | None = None
        """Host's clock minus device's."""

    def begin(self) -> Mark:
        return None if self._skips else mark(self._device)

    def end(self, kind: Doing, src: int, dst: int, action: Action | None, begun: Mark) -> None:
        if begun is None:
            return
        assert isinstance(begun, torch.Event)
        self._row.pending += 1
        self._issued.append((self._row, kind, src, dst, action, begun, mark(self._device)))

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        if not self._skips:
            self._bases.append((self._row, mark(self._device)))
        self._take()

    def settle(self) -> None:
        if self._issued:
            self._issued[-1][-1].synchronize()
        self._take()

    def events(self, number: int) -> list[tuple[Doing, Action | None, int, int]]:
        ahead = self._ahead_ns or 0
        return [
            (kind, action, begin, end) if kind in OF_HOST else (kind, action, begin + ahead, end + ahead)
            for kind, action, begin, end in super().events(number)
        ]

    def _take(self) -> None:
        """Take the times of what the device has done."""
        while self._issued and self._issued[0][-1].query():
            row, kind, src, dst, action, first, last = self._issued.popleft()
            self._go_on_to(row)
            assert self._base is not None
            begin = self._base_ns + round(self._base.elapsed_time(first) * 1e6)
            end = begin + round(first.elapsed_time(last) * 1e6)
            self._add(row, kind, src, dst, action, begin, end)
            row.pending -= 1

    def _go_on_to(self, row: StepRow) -> None:
        """Measure from the begin of `row`, and not of an older one: a time is the less exact the longer it is."""
        while self._bases and self._bases[0][0].begin_ns <= row.begin_ns:
            begun, base = self._bases.popleft()
            if self._base is not None:
                self._base_ns += round(self._base.elapsed_time(base) * 1e6)
            self._base = base
            least = begun.begin_ns - self._base_ns
            self._ahead_ns = least if self._ahead_ns is None else max(self._ahead_ns, least)
