"""Times on a simulated device: a queue that is worked off behind the host, caches, and clocks that are low at first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rannd.device import caches, timing
from rannd.device.timing import (
    AHEAD,
    LEAST_AHEAD_US,
    REPEATS,
    WARM_US,
    HostClock,
    HostTime,
    Sample,
    Span,
    Stamp,
    Timer,
    host_sample,
)

PIECE_US = 100.0


@contextlib.contextmanager
def one_core(others: int = 0) -> Iterator[None]:
    """Binds this thread to a core that so many busy processes have as well."""
    cores = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        for pid in (0, *(each.pid for each in busy)):
            os.sched_setaffinity(pid, {min(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for each in busy:
            each.kill()
            each.wait()


@pytest.fixture
def single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes in ranks that have one core each."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def compute(seconds: float) -> None:
    """Use so much time of a processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def ready_us() -> float:
    """How long this thread was ready to run, but not on a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e3


def threads_us() -> float:
    """What other threads of this process have computed."""
    return (time.process_time_ns() - time.thread_time_ns()) / 1e3


class Simulated:
    """A host and a device with clocks of their own. The host passes time by issuing, the device by computing."""

    def __init__(self, *, launch_us: float = 5.0, warm_after_us: float = 0.0) -> None:
        self.host = 0.0
        self.device = 0.0
        self.busy = 0.0
        """Time that the device has computed."""
        self.waits = 0
        self.cached = False
        """Whether a kernel's data are in the caches."""
        self._launch_us, self._warm_after_us = launch_us, warm_after_us

    def issue(self, device_us: float) -> None:
        """Issue a kernel: it starts when it has been issued and what was issued before is done."""
        self.host += self._launch_us
        slower = 2.0 if self.busy < self._warm_after_us else 1.0
        self.device = max(self.device, self.host) + device_us * slower
        self.busy += device_us * slower

    def kernel(self, device_us: float, from_memory_us: float = 0.0) -> None:
        """A kernel that takes longer while its data are not in the caches."""
        self.issue(device_us if self.cached else device_us + from_memory_us)
        self.cached = True

    def evict(self, device_us: float = 40.0) -> None:
        self.issue(device_us)
        self.cached = False

    # -- as Timer sees it

    def host_us(self) -> float:
        return self.host

    def mark(self) -> list[float]:
        self.host += 1.0
        self.device = max(self.device, self.host)
        return [self.device]

    def between_us(self, first: list[float], last: list[float]) -> float:
        return last[0] - first[0]

    def work(self) -> None:
        self.issue(PIECE_US)

    def wait(self) -> None:
        self.waits += 1
        self.host = max(self.host, self.device) + 10.0


def measured(device: Simulated, run: Callable[[], None]) -> Span:
    def action(stamp: Stamp) -> None:
        device.evict()
        stamp()
        run()
        stamp()

    (found,) = Timer(device).spans(action, REPEATS)
    return found


@pytest.mark.parametrize("kernels", [1, 10, 300])
def test_a_device_that_computes_long_costs_its_own_time(kernels: int) -> None:
    device = Simulated()
    found = measured(device, lambda: [device.kernel(100.0) for _ in range(kernels)] and None)
    assert found.device_us == pytest.approx(100.0 * kernels), "no gap, no launch, no eviction"
    assert found.host_us == pytest.approx(5.0 * kernels)
    assert found.us == found.device_us


@pytest.mark.parametrize("kernels", [1, 10, 300])
def test_small_kernels_cost_what_the_host_needs_to_issue_them(kernels: int) -> None:
    device = Simulated()
    found = measured(device, lambda: [device.kernel(2.0) for _ in range(kernels)] and None)
    assert found.us == found.host_us == pytest.approx(5.0 * kernels)
    assert found.device_us == pytest.approx(2.0 * kernels), "the host was ahead"


def test_what_is_read_from_memory_is_counted_in_each_repeat() -> None:
    device = Simulated()
    assert measured(device, lambda: device.kernel(50.0, from_memory_us=30.0)).us == pytest.approx(80.0)


def test_clocks_are_warm_before_anything_counts() -> None:
    cold = Simulated(warm_after_us=0.9 * WARM_US)
    cold.kernel(100.0)
    assert cold.device - cold.host == pytest.approx(200.0), "the clocks are low"
    assert measured(cold, lambda: cold.kernel(100.0)).us == pytest.approx(100.0)


def test_the_host_does_not_wait_between_the_repeats_of_the_device() -> None:
    device = Simulated()
    timer = Timer(device)
    waits: list[int] = []

    def action(stamp: Stamp) -> None:
        stamp()
        waits.append(device.waits)
        device.kernel(100.0)
        stamp()

    timer.spans(action, REPEATS)
    untimed, host, issued = waits[0], waits[1 : 1 + REPEATS], waits[1 + REPEATS :]
    assert host == list(range(untimed + 1, untimed + 1 + REPEATS)), "by the host's clock from an empty queue on"
    assert len(issued) == REPEATS
    assert set(issued) == {host[-1] + 1}


def test_the_work_ahead_is_as_long_as_it_has_to_be() -> None:
    def ahead(kernels: int) -> float:
        device = Simulated(launch_us=10.0)
        timer = Timer(device)
        works: list[int] = []
        work = device.work

        def counted() -> None:
            works.append(1)
            work()

        device.work = counted  # type: ignore[method-assign]
        timer.spans(lambda stamp: [device.kernel(1.0) for _ in range(kernels)] and None, REPEATS)
        return len(works) * PIECE_US

    assert ahead(1) == LEAST_AHEAD_US
    assert ahead(100) >= AHEAD * REPEATS * 100 * 10.0


def test_an_action_that_waits_for_the_device_costs_the_wait() -> None:
    """Such as one that reads how many rows a mask selects."""
    device = Simulated()

    def run() -> None:
        device.kernel(100.0)
        device.wait()
        device.kernel(100.0)

    found = measured(device, run)
    assert found.device_us == pytest.approx(100 + 10 + 5 + 100), "the device waits for the host in its middle"
    assert found.host_us == pytest.approx(5 + 100 + 10 + 5), "without the eviction before it"


def test_spans_of_an_action_are_apart() -> None:
    device = Simulated()

    def action(stamp: Stamp) -> None:
        for us in (100.0, 200.0):
            device.evict()
            stamp()
            device.kernel(us)
            stamp()

    assert [span.us for span in Timer(device).spans(action, 3)] == pytest.approx([100.0, 200.0])
    assert Timer(device).spans(lambda stamp: None, 3) == []


def test_one_disturbed_repeat_does_not_count() -> None:
    device = Simulated()
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        device.kernel(1000.0 if len(runs) % REPEATS == 0 else 100.0)

    assert measured(device, run).us == pytest.approx(100.0)


def test_on_the_cpu_each_run_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(HostClock, "read", lambda self: HostTime(next(clock) ** 2, 0.0, 0))

    def action(stamp: Stamp) -> None:
        for _ in range(4):
            stamp()

    found = timing.spans(torch.device("cpu"), action, 3)
    assert found == [[Sample(1.0), Sample(5**2 - 4**2), Sample(9**2 - 8**2)], [Sample(5.0), Sample(13.0), Sample(21.0)]]


def test_what_a_thread_waited_for_a_processor_is_not_counted() -> None:
    def sample(wall: float, delayed: float, preempted: int = 0, *, disturbs: bool) -> Sample:
        first = HostTime(1000.0, 500.0, 3)
        return host_sample(first, HostTime(1000.0 + wall, 500.0 + delayed, 3 + preempted), disturbs=disturbs)

    assert sample(300, 200, 2, disturbs=False) == Sample(100)
    assert sample(300, 0, 0, disturbs=True) == Sample(300)
    assert sample(300, 0, 1, disturbs=True) == Sample(300, disturbed=True), "other threads may have waited, too"


def test_a_processor_that_others_take_away_is_not_counted() -> None:
    """For real: a thread that computes and sleeps, in turns with busy processes on its only core."""
    clock = HostClock()
    assert clock.tells_delays
    with one_core(others=2):
        first = clock.read()
        compute(0.3)
        time.sleep(0.2)
        last = clock.read()
    assert last.preempted > first.preempted
    assert last.wall_us - first.wall_us > 700_000
    assert 490_000 < host_sample(first, last, disturbs=False).us < 600_000


@pytest.mark.usefixtures("single_threaded")
def test_a_processor_that_the_process_itself_takes_is_counted() -> None:
    """As threads that copy messages do, in each step."""
    clock = HostClock()
    with one_core(), ThreadPoolExecutor(1) as pool:
        first, ready, threads, begun = clock.read(), ready_us(), threads_us(), clock.moment()
        copying = pool.submit(hashlib.pbkdf2_hmac, "sha256", b"", b"", 300_000)  # computes without the interpreter
        while not copying.done():
            compute(0.01)
        last, ready, threads, ended = clock.read(), ready_us() - ready, threads_us() - threads, clock.moment()
    assert ready >= 0.9 * threads > 50_000
    # What is left was waited for other processes: tests run beside this one.
    assert last.delayed_us - first.delayed_us < ready - 0.8 * threads
    assert 0.8 * threads < ended.threads_us - begun.threads_us < 1.1 * threads + 1000


@pytest.mark.usefixtures("single_threaded")
def test_what_threads_computed_before_they_shared_a_processor_does_not_count() -> None:
    clock = HostClock()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute, 0.1).result()
    begun = clock.moment()
    with one_core(others=1):
        compute(0.05)
        ended = clock.moment()
    assert ended.delayed_us - begun.delayed_us > 20_000
    assert ended.threads_us - begun.threads_us < 10_000


@pytest.mark.usefixtures("single_threaded")
def test_threads_and_forks_have_their_own_clocks() -> None:
    clock = HostClock()

    def is_right() -> bool:
        earliest, threads, first, early = ready_us(), threads_us(), clock.moment()[1], ready_us()
        with one_core(others=1):
            compute(0.05)
        late, last, latest = ready_us(), clock.moment()[1], ready_us()
        assert late - early > 20_000
        return late - early - (threads_us() - threads) - 1 <= last - first <= latest - earliest + 1

    assert is_right()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_right).result()
    assert is_right()
    child = os.fork()
    if child == 0:
        os._exit(0 if is_right() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_clock_whose_file_was_closed_tells_no_delays() -> None:
    clock = HostClock()
    assert clock.tells_delays
    os.close(clock._known.schedstat._file)
    clock._known.switches = -1
    assert clock.moment()[1] >= 0
    assert not clock.tells_delays
    del clock._known.schedstat


def test_twice_the_cache_of_a_device_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        L2_cache_size = 50 << 20

        def get_device_properties(self, device: torch.device) -> Module:
            return self

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
    assert caches.eviction_bytes(torch.device("cuda", 0)) == 100 << 20
    monkeypatch.setattr(Module, "L2_cache_size", 4 << 20)
    assert caches.eviction_bytes(torch.device("cuda", 0)) == caches.LEAST
    assert caches.eviction_bytes(torch.device("cuda", 0), small=True) == caches.LEAST
    assert caches.eviction_bytes(torch.device("cpu")) == caches.LEAST
    assert caches.eviction_bytes(torch.device("cpu"), small=True) == caches.SMALL


@pytest.mark.gpu
def test_times_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    large = torch.rand(8192, 8192, device=device)
    small = torch.rand(16, device=device)

    def action(stamp: Stamp) -> None:
        caches.evict(device)
        stamp()
        torch.mm(large, large)
        stamp()
        stamp()
        for _ in range(100):
            small.add_(1)
        stamp()

    spans = timing.Timer(timing.EventQueue(device)).spans(action, REPEATS)
    assert spans[0].device_us > 10 * spans[0].host_us
    assert spans[1].host_us > 100
    assert spans[1].device_us < 10 * spans[1].host_us
    timing.release()
    caches.release()
