"""Measures how long a rank's actions take, while it goes on: on an accelerator nobody waits for the device."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from rannd.device.identity import is_accelerator


class Timed(NamedTuple):
    """Microseconds of actions that are done."""

    measured_us: float = 0.0
    planned_us: float = 0.0
    """What the plan says of them."""
    scaled_us: float = 0.0
    """The same, if the time of an action grows with its rows."""


def mark(device: torch.device) -> torch.Event:
    """Return an event that an accelerator passes when it has done what its current stream has been given so far."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class ActionClock:
    """Measures blocks, ``with clock: ...``, of one thread at a time, in which the rank waits for nobody.

    On the CPU by the host's clock. On an accelerator between two events of the current stream, which are read once the
    device has passed them, in a later step perhaps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued = is_accelerator(device)
        self._expected = (0.0, 0.0)
        self._start_s = 0.0
        self._first: torch.Event | None = None
        self._issued: deque[tuple[torch.Event, torch.Event, tuple[float, float]]] = deque()
        """Blocks whose times are not read yet: first and last event, and what was expected."""
        self._done = Timed()

    def expect(self, planned_us: float, scaled_us: float) -> None:
        """The blocks from the next one on, up to the next call, are an action with these times in the plan."""
        self._expected = (self._expected[0] + planned_us, self._expected[1] + scaled_us)

    def __enter__(self) -> None:
        if self._queued:
            self._first = mark(self._device)
        else:
            self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        expected, self._expected = self._expected, (0.0, 0.0)
        if self._first is not None:
            self._issued.append((self._first, mark(self._device), expected))
            self._first = None
        else:
            self._add((time.perf_counter() - self._start_s) * 1e6, expected)

    def take(self) -> Timed:
        """Return the times since the last call, of the blocks that the device has done."""
        while self._issued and self._issued[0][1].query():
            first, last, expected = self._issued.popleft()
            self._add(first.elapsed_time(last) * 1e3, expected)
        done, self._done = self._done, Timed()
        return done

    def _add(self, us: float, expected: tuple[float, float]) -> None:
        done = self._done
        self._done = Timed(done.measured_us + us, done.planned_us + expected[0], done.scaled_us + expected[1])
