"""Times of what a device does: its own time by events, and the time that the host needs to issue it.

A device works behind the host, on a queue. Its time is taken between events, for several repeats that are issued
without waiting, behind other work that is long enough for the host to get ahead of the device::

    host    | issue the work ahead | issue repeat 1 | issue repeat 2 | ..        wait
    device      | work ahead ................................| evict | E forward E | evict | E forward E | ..

so gaps in which the device would wait for the host do not count, nor does what lies between the events of two spans.
The host's time is taken apart, from an empty queue on and without waiting. A span costs the larger of the two: a model
runs no faster than it is issued, and no faster than the device computes.

On the CPU a span costs its wall time, less what the thread waited for a processor that other processes had. What it
waited for other threads of its own process counts: those that copy messages are part of what a message takes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from rannd.device.identity import is_accelerator
from rannd.device.memory_beside import refuses_products
from rannd.device.streams import synchronize

Stamp: TypeAlias = Callable[[], None]
Action: TypeAlias = Callable[[Stamp], None]
"""Does something, and calls its argument at the beginning and at the end of each span of it that counts."""

Mark = TypeVar("Mark")
T = TypeVar("T")

QUARTILE = 0.25
"""Fraction of an accelerator's runs that are at most as long as the one that counts: other processes only make them
longer."""
REPEATS = 5
"""Runs of an action that are timed on an accelerator."""
WARM_US = 300_000.0
"""Microseconds of work before the first measurement: the clocks of an idle device are low."""
PIECES = 32
"""Pieces of that work which are issued together."""
SIDE = 4096
"""Rows and columns of the matrices of a piece of work: longer than it takes to issue it."""
AHEAD = 2.0
"""Work ahead of the measured repeats, relative to the time in which the host issues them."""
LEAST_AHEAD_US, MOST_AHEAD_US = 2_000.0, 100_000.0


class Queue(Protocol[Mark]):
    """A device that does in order what the host issues, and the host's clock."""

    def host_us(self) -> float:
        """The host's clock, in microseconds."""

    def mark(self) -> Mark:
        """Issue a mark."""

    def between_us(self, first: Mark, last: Mark) -> float:
        """The device's microseconds from one mark to another; both have been reached."""

    def work(self) -> None:
        """Issue a piece of work that takes the same time whenever clocks are the same."""

    def wait(self) -> None:
        """Let the host wait until everything that was issued is done."""


class Span(NamedTuple):
    """Microseconds of a part of an action."""

    host_us: float
    device_us: float

    @property
    def us(self) -> float:
        """What it costs."""
        return max(self)


class Sample(NamedTuple):
    """Microseconds of one run of a part of an action."""

    us: float
    disturbed: bool = False
    """Whether other processes may have made it longer."""


class Timer(Generic[Mark]):
    """Times actions on a device with a queue; warms it first."""

    def __init__(self, queue: Queue[Mark]) -> None:
        self._queue = queue
        self._piece_us = 0.0
        """The device's time for a piece of work."""
        start = queue.host_us()
        while not self._piece_us or queue.host_us() - start < WARM_US:
            first = queue.mark()
            for _ in range(PIECES):
                queue.work()
            last = queue.mark()
            queue.wait()
            self._piece_us = max(queue.between_us(first, last) / PIECES, 0.1)

    def spans(self, action: Action, repeats: int) -> list[Span]:
        """Times of the spans of an action, which is first run once untimed: it loads, allocates and tunes.

        They are the lower quartiles of `repeats` runs.
        """
        action(_nothing)
        host, issue_us = self._on_host(action, repeats)
        device = self._on_device(action, repeats, issue_us)
        return [Span(*each) for each in zip(_quartiles(host), _quartiles(device), strict=True)]

    def _on_host(self, action: Action, repeats: int) -> tuple[list[list[float]], float]:
        """The spans of each repeat by the host's clock, and the microseconds in which all of it was issued.

        A span begins with an empty queue: if it waits for the device itself, then for its own work alone.
        """
        clock, issue_us = self._queue.host_us, 0.0
        stamps: list[float] = []

        def stamp() -> None:
            nonlocal issue_us
            if len(stamps) % 2 == 0:
                start = clock()
                self._queue.wait()
                issue_us -= clock() - start
            stamps.append(clock())

        found = []
        for _ in range(repeats):
            stamps.clear()
            start = clock()
            action(stamp)
            issue_us += clock() - start
            found.append([last - first for first, last in _pairs(stamps)])
        return found, issue_us

    def _on_device(self, action: Action, repeats: int, issue_us: float) -> list[list[float]]:
        """The spans of each repeat by the device's clock."""
        queue = self._queue
        queue.wait()
        ahead_us = min(max(AHEAD * issue_us, LEAST_AHEAD_US), MOST_AHEAD_US)
        for _ in range(ceil(ahead_us / self._piece_us)):
            queue.work()
        marks: list[list[Mark]] = [[] for _ in range(repeats)]
        for each in marks:
            action(functools.partial(_note, queue.mark, each))
        queue.wait()
        return [[queue.between_us(first, last) for first, last in _pairs(each)] for each in marks]


class EventQueue:
    """The current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factor = torch.zeros(SIDE, SIDE, dtype=torch.float16, device=device)
        self._product = torch.zeros_like(self._factor)

    def host_us(self) -> float:
        """The host's clock, in microseconds."""
        return time.perf_counter() * 1e6

    def mark(self) -> torch.Event:
        """Record an event."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between_us(self, first: torch.Event, last: torch.Event) -> float:
        """The device's microseconds between two events."""
        return first.elapsed_time(last) * 1e3

    def work(self) -> None:
        """Issue a product of matrices, or, where torch refuses them, something else."""
        if refuses_products():
            torch.exp(self._factor, out=self._product)
        else:
            torch.mm(self._factor, self._factor, out=self._product)

    def wait(self) -> None:
        """Wait for the device."""
        synchronize(self._device)


_timers: dict[torch.device, Timer[torch.Event]] = {}


class HostTime(NamedTuple):
    """The host's clocks at one moment."""

    wall_us: float
    delayed_us: float
    """How long this thread has waited for a processor that other processes had."""
    preempted: int
    """How often a processor was taken away from the process."""


class Moment(NamedTuple):
    """The clocks of a thread of the host at one moment: nothing took the processor away between them."""

    ns: int
    """The wall clock."""
    delayed_us: float
    """How long it has waited for a processor that other processes had, and"""
    threads_us: float
    """that other threads of its own process had; both from the first reading on, and 0 where nothing tells them."""


class _Schedstat:
    """What Linux tells of the thread that has opened it: how long it was ready to run, but not on a processor."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def delayed_us(self) -> float:
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e3

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # the script may have closed all files
            os.close(self._file)


class HostClock:
    """Reads clocks for the thread that asks."""

    def __init__(self) -> None:
        self._known = threading.local()

    def read(self) -> HostTime:
        """Return the time."""
        now = self.moment()
        return HostTime(now.ns / 1e3, now.delayed_us, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)

    def moment(self) -> Moment:
        """Return the time for the thread that asks."""
        known = self._known
        for _ in range(_ATTEMPTS):
            self._look()
            now = time.perf_counter_ns()
            if _switches() == known.switches:
                break
        return Moment(now, known.delayed_us, known.threads_us)

    def _look(self) -> None:
        """Take note of what the thread has waited for, if it has left its processor since it looked."""
        known, switches = self._known, _switches()
        if getattr(known, "process", 0) != os.getpid():  # a fork has its own
            known.process, known.switches, known.waited = os.getpid(), -1, None
            known.delayed_us = known.threads_us = 0.0
            try:
                known.schedstat = _Schedstat()
            except OSError:
                known.schedstat = None
        if switches != known.switches:  # it changes with them only
            known.switches = switches
            try:
                if known.schedstat is not None:
                    waited = known.schedstat.delayed_us(), _other_threads_us()
                    if known.waited is not None:
                        ready_us, threads_us = (now - then for now, then in zip(waited, known.waited, strict=True))
                        threads_us = min(max(threads_us, 0.0), ready_us) if has_one_processor() else 0.0
                        known.threads_us += threads_us
                        known.delayed_us += ready_us - threads_us
                    known.waited = waited
            except (OSError, IndexError, ValueError):  # the script has closed it
                known.schedstat = None

    @property
    def tells_delays(self) -> bool:
        """Whether delays are known."""
        self._look()
        return self._known.schedstat is not None


_ATTEMPTS = 5
"""How often clocks are read again if the processor was taken away between them."""


def _switches() -> int:
    """How often this thread has left a processor."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_nvcsw + used.ru_nivcsw


def has_one_processor() -> bool:
    """Whether all threads of this process share one processor, so that one that computes waits for the others."""
    return torch.get_num_threads() == 1 and len(os.sched_getaffinity(0)) == 1


def _other_threads_us() -> float:
    """Return the microseconds that other threads of this process have computed."""
    return (time.process_time_ns() - time.thread_time_ns()) / 1e3


def host_sample(first: HostTime, last: HostTime, *, disturbs: bool) -> Sample:
    """Return what the computations between two moments take by themselves.

    `disturbs`: whether a processor that was taken away has an unknown effect: that other threads compute, too, or that
    delays are not known.
    """
    us = last.wall_us - first.wall_us - (last.delayed_us - first.delayed_us)
    return Sample(max(us, 0.0), disturbs and last.preempted > first.preempted)


_clock = HostClock()


def spans(device: torch.device, action: Action, repeats: int = 1) -> list[list[Sample]]:
    """Return samples of each span of an action.

    Args:
        device: Device that it computes on.
        action: Is run several times.
        repeats: Runs on the CPU, each of which is a sample. On an accelerator there is one sample of `REPEATS` runs by
            the host's clock and as many by the device's, after one that is not timed.
    """
    if is_accelerator(device):
        if device not in _timers:
            _timers[device] = Timer(EventQueue(device))
        return [[Sample(span.us)] for span in _timers[device].spans(action, REPEATS)]
    disturbs = torch.get_num_threads() > 1 or not _clock.tells_delays
    found: list[list[Sample]] = []
    for _ in range(repeats):
        stamps: list[HostTime] = []
        action(functools.partial(_note, _clock.read, stamps))
        found.append([host_sample(first, last, disturbs=disturbs) for first, last in _pairs(stamps)])
    return [list(each) for each in zip(*found, strict=True)]


def release() -> None:
    """Free the memory of the work that keeps clocks high. Before the next measurement they are warmed again."""
    _timers.clear()


def _note(read: Callable[[], T], notes: list[T]) -> None:
    notes.append(read())


def _nothing() -> None:
    """A stamp that is not kept."""


def _pairs(stamps: Sequence[T]) -> Iterator[tuple[T, T]]:
    return zip(stamps[::2], stamps[1::2], strict=True)


def _quartiles(runs: Sequence[Sequence[float]]) -> list[float]:
    return [sorted(times)[int(QUARTILE * (len(times) - 1))] for times in zip(*runs, strict=True)]
