"""Measure how fast ranks talk: point to point between two of them, and an all-reduce among all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rannd.profile.costs import LinkCost

SMALL, LARGE = 4 * 1024, 4 * 1024 * 1024
"""Sizes of the messages, in bytes: one shows the latency, both together the bandwidth."""
BUCKET = 25 << 20
"""Bytes of an all-reduce: as many as gradients are reduced at once, more than caches hold."""
REPEATS = 5


def measure_links(group: dist.ProcessGroup, device: torch.device, pair: tuple[int, int] = (0, 1)) -> LinkCost:
    """Costs of the links among the ranks of `group`, the same on all of them. Collective.

    `pair`: the two (numbers in the group) that send to each other, while the others wait.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = (SMALL, LARGE, BUCKET)
    buffers = {nbytes: torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for nbytes in sizes}
    gradients = {nbytes: torch.zeros_like(buffer) for nbytes, buffer in buffers.items()}

    def bounce(nbytes: int) -> None:
        buffer = buffers[nbytes]
        if rank == pair[0]:
            dist.send(buffer, group=group, group_dst=pair[1])
            dist.recv(buffer, group=group, group_src=pair[1])
        elif rank == pair[1]:
            dist.recv(buffer, group=group, group_src=pair[0])
            dist.send(buffer, group=group, group_dst=pair[0])

    def reduce(nbytes: int) -> None:
        # As gradients are reduced: put together, summed, and given back.
        buffers[nbytes].copy_(gradients[nbytes])
        dist.all_reduce(buffers[nbytes], group=group)
        gradients[nbytes].copy_(buffers[nbytes])

    times = torch.zeros(4, dtype=torch.float64, device=device)
    for place, (action, nbytes) in enumerate(((bounce, SMALL), (bounce, LARGE), (reduce, SMALL), (reduce, BUCKET))):
        dist.barrier(group=group)
        times[place] = _time(action, nbytes, device)
    if rank != pair[0]:
        times.zero_()
    dist.all_reduce(times, group=group)  # what the first of the pair saw
    small, large, small_reduce, large_reduce = times.tolist()
    # A bounce is two messages; n ranks move 2(n-1)/n times the buffer each in an all-reduce of 2(n-1) steps.
    latency, bandwidth = _fit(small / 2, large / 2, LARGE)
    steps = 2.0 * (size - 1)
    reduce_latency, reduce_bandwidth = _fit(small_reduce, large_reduce, BUCKET)
    return LinkCost(latency, bandwidth, reduce_latency * 2 / steps, reduce_bandwidth * steps / size)


def _time(action: Callable[[int], None], nbytes: int, device: torch.device) -> float:
    """Median time of some runs, in microseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action(nbytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _fit(small: float, large: float, nbytes: int) -> tuple[float, float]:
    """(latency in us, bandwidth in bytes per us) from the times of `SMALL` bytes and of `nbytes`."""
    bandwidth = (nbytes - SMALL) / max(large - small, 1.0)
    return max(small - SMALL / bandwidth, 0.0), bandwidth


def copy_speed(device: torch.device) -> LinkCost:
    """Costs of links for a plan for devices that are not there: those of a copy on this device."""
    source = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(nbytes: int) -> None:
        target[:nbytes].copy_(source[:nbytes])

    latency, bandwidth = _fit(_time(copy, SMALL, device), _time(copy, LARGE, device), LARGE)
    return LinkCost(latency, bandwidth, latency, bandwidth)
