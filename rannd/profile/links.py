"""Measures the links between ranks: point-to-point transfers between two ranks and an all-reduce among all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from rannd.device import caches, timing
from rannd.device.identity import is_accelerator
from rannd.profile.costs import LinkCost
from rannd.profile.samples import typical

SMALL, LARGE = 4 << 10, 4 << 20
"""Smallest and largest message in bytes. One between them is sent, too, see `sizes_up_to`."""
FASTER = 16
"""The largest message between accelerators, relative to `LARGE`: their links take no time for that one."""
BUCKET = 25 << 20
"""Bytes of the largest all-reduce: the size of a gradient bucket, larger than caches."""
REPEATS = 8
DISTURBED = 1.75
"""Factor by which the largest message may take longer than the middle one says: caches speed up the smaller ones."""


def measure_links(group: dist.ProcessGroup, device: torch.device, pair: tuple[int, int] = (0, 1)) -> LinkCost:
    """Measure the links among the ranks of `group`; the result is the same on all ranks. Collective.

    Args:
        group: Process group of the ranks.
        device: Device of the messages.
        pair: The two ranks of the group that send to each other while the others wait.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    messages, buckets = sizes_up_to(_largest(device)), sizes_up_to(BUCKET)
    buffers = {
        nbytes: torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for nbytes in {*messages, *buckets, 4}
    }
    received = {nbytes: torch.zeros_like(buffers[nbytes]) for nbytes in {*messages, 4}}
    gradients = {nbytes: torch.zeros_like(buffers[nbytes]) for nbytes in buckets}
    through_host = is_accelerator(device) and dist.get_backend(group) == "gloo"  # which cannot read a device's memory

    def send(buffer: torch.Tensor, peer: int) -> None:
        dist.send(buffer.cpu() if through_host else buffer, group=group, group_dst=peer)

    def receive(buffer: torch.Tensor, peer: int) -> None:
        there = torch.empty_like(buffer, device="cpu") if through_host else buffer
        dist.recv(there, group=group, group_src=peer)
        if through_host:
            buffer.copy_(there)

    def bounce(nbytes: int) -> None:
        if rank == pair[0]:
            send(buffers[nbytes], pair[1])
            receive(received[nbytes], pair[1])
        elif rank == pair[1]:
            receive(received[nbytes], pair[0])
            send(buffers[nbytes], pair[0])

    def reduce(nbytes: int) -> None:
        # As gradients are reduced: copied into a bucket, summed, and copied back.
        buffers[nbytes].copy_(gradients[nbytes])
        dist.all_reduce(buffers[nbytes], group=group)
        gradients[nbytes].copy_(buffers[nbytes])

    jobs = [*((bounce, nbytes) for nbytes in messages), *((reduce, nbytes) for nbytes in buckets)]

    def ready(action: Callable[[int], None], nbytes: int) -> None:
        """Bring caches into the state in which they are in a step: what is sent has just been computed. Then meet."""
        if not is_accelerator(device):
            caches.evict(device)
            (buffers if action is bounce else gradients)[nbytes].add_(1.0)
            bounce(4) if action is bounce else dist.barrier(group=group)

    times = torch.zeros(len(jobs) + 1, dtype=torch.float64, device=device)
    for place, (action, nbytes) in enumerate(jobs):
        dist.barrier(group=group)
        times[place] = _time(action, nbytes, device, ready)
    alone = torch.tensor(float(not is_accelerator(device) and timing.has_one_processor()), device=device)
    dist.all_reduce(alone, dist.ReduceOp.MIN, group=group)  # those of a pair measure it together
    if alone.item():
        times[-1] = _processor_us(bounce, messages[0], messages[-1], ready)
    timing.release()
    caches.release()
    if rank != pair[0]:
        times.zero_()
    dist.all_reduce(times, group=group)  # all ranks use the times of the pair's first rank
    sent, reduced, (bounced,) = (each.tolist() for each in times.split([len(messages), len(buckets), 1]))
    # A bounce is two messages; in an all-reduce of 2(n-1) steps each of n ranks moves 2(n-1)/n times the buffer.
    latency, bandwidth = fit(messages, [us / 2 for us in sent])
    steps = 2.0 * (size - 1)
    reduce_latency, reduce_bandwidth = fit(buckets, reduced)
    return LinkCost(
        latency,
        bandwidth,
        reduce_latency * 2 / steps,
        reduce_bandwidth * steps / size,
        min(bounced / 2, 1 / bandwidth),  # both sides copy at the same time
        # A reduction has many steps, in each of which ranks that compute as well wait for each other's processor.
        alone.item() * size / steps / reduce_bandwidth,
    )


_Action: TypeAlias = Callable[[int], None]


def _processor_us(action: _Action, small: int, large: int, ready: Callable[[_Action, int], None]) -> float:
    """Return what a byte takes of the processor of this process, in microseconds."""
    took = []
    for nbytes in (small, large):
        each = []
        for _ in range(REPEATS):
            ready(action, nbytes)
            start = time.process_time_ns()
            action(nbytes)
            each.append(time.process_time_ns() - start)
        took.append(sorted(each)[REPEATS // 4] / 1e3)  # other processes only make it longer
    return max(took[1] - took[0], 0.0) / (large - small)


def copy_speed(device: torch.device) -> LinkCost:
    """Return link costs from the speed of copies on this device, for plans for devices that are not available."""
    sizes = sizes_up_to(_largest(device))
    source = torch.zeros(sizes[-1], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(nbytes: int) -> None:
        target[:nbytes].copy_(source[:nbytes])

    latency, bandwidth = fit(sizes, [_time(copy, nbytes, device, lambda *_: None) for nbytes in sizes])
    timing.release()
    return LinkCost(latency, bandwidth, latency, bandwidth)


def sizes_up_to(largest: int) -> tuple[int, int, int]:
    """Sizes to measure, in bytes: the latency shows in the smallest, the bandwidth in each of the others."""
    return SMALL, largest // 4, largest


def fit(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return (latency in us, bandwidth in bytes per us) from the times for three ascending sizes, in microseconds.

    It is the line through the smallest and the largest, unless the middle one shows that the largest was disturbed.
    """
    # A message takes no longer than a larger one: what says so was disturbed.
    small, middle, large = ((size, min(times[place:])) for place, size in enumerate(sizes))
    latency, bandwidth = _line(small, large)
    if latency + middle[0] / bandwidth > DISTURBED * middle[1]:
        return _line(small, middle)
    return latency, bandwidth


def _line(first: tuple[int, float], last: tuple[int, float]) -> tuple[float, float]:
    """Return the (latency, bandwidth) with which two messages take their times."""
    bandwidth = (last[0] - first[0]) / max(last[1] - first[1], 1.0)
    return max(first[1] - first[0] / bandwidth, 0.0), bandwidth


def _largest(device: torch.device) -> int:
    return LARGE * FASTER if is_accelerator(device) else LARGE


def _time(action: _Action, nbytes: int, device: torch.device, ready: Callable[[_Action, int], None]) -> float:
    """Return the typical time of several runs, in microseconds; `ready` is called before each."""

    def run(stamp: timing.Stamp) -> None:
        ready(action, nbytes)
        stamp()
        action(nbytes)
        stamp()

    return typical([timing.spans(device, run, REPEATS)[0]])[0]
