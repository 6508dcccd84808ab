"""Measures the links between ranks: point-to-point transfers between two ranks and an all-reduce among all."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from rannd.device.streams import now
from rannd.profile.costs import LinkCost

SMALL, LARGE = 4 * 1024, 4 * 1024 * 1024
"""Message sizes in bytes: the small one gives the latency, both together the bandwidth."""
BUCKET = 25 << 20
"""Bytes of an all-reduce: the size of a gradient bucket, larger than caches."""
REPEATS = 5


def measure_links(group: dist.ProcessGroup, device: torch.device, pair: tuple[int, int] = (0, 1)) -> LinkCost:
    """Measure the links among the ranks of `group`; the result is the same on all ranks. Collective.

    Args:
        group: Process group of the ranks.
        device: Device of the messages.
        pair: The two ranks of the group that send to each other while the others wait.
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
        # As gradients are reduced: copied into a bucket, summed, and copied back.
        buffers[nbytes].copy_(gradients[nbytes])
        dist.all_reduce(buffers[nbytes], group=group)
        gradients[nbytes].copy_(buffers[nbytes])

    times = torch.zeros(4, dtype=torch.float64, device=device)
    for place, (action, nbytes) in enumerate(((bounce, SMALL), (bounce, LARGE), (reduce, SMALL), (reduce, BUCKET))):
        dist.barrier(group=group)
        times[place] = _time(action, nbytes, device)
    if rank != pair[0]:
        times.zero_()
    dist.all_reduce(times, group=group)  # all ranks use the times of the pair's first rank
    small, large, small_reduce, large_reduce = times.tolist()
    # A bounce is two messages; in an all-reduce of 2(n-1) steps each of n ranks moves 2(n-1)/n times the buffer.
    latency, bandwidth = _fit(small / 2, large / 2, LARGE)
    steps = 2.0 * (size - 1)
    reduce_latency, reduce_bandwidth = _fit(small_reduce, large_reduce, BUCKET)
    return LinkCost(latency, bandwidth, reduce_latency * 2 / steps, reduce_bandwidth * steps / size)


def _time(action: Callable[[int], None], nbytes: int, device: torch.device) -> float:
    """Return the median time of several runs, in microseconds."""
    times = []
    for _ in range(REPEATS):
        start = now(device)
        action(nbytes)
        times.append((now(device) - start) * 1e6)
    return statistics.median(times)


def _fit(small: float, large: float, nbytes: int) -> tuple[float, float]:
    """Return (latency in us, bandwidth in bytes per us) from the times for `SMALL` bytes and for `nbytes`."""
    bandwidth = (nbytes - SMALL) / max(large - small, 1.0)
    return max(small - SMALL / bandwidth, 0.0), bandwidth


def copy_speed(device: torch.device) -> LinkCost:
    """Return link costs from the speed of copies on this device, for plans for devices that are not available."""
    source = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(nbytes: int) -> None:
        target[:nbytes].copy_(source[:nbytes])

    latency, bandwidth = _fit(_time(copy, SMALL, device), _time(copy, LARGE, device), LARGE)
    return LinkCost(latency, bandwidth, latency, bandwidth)
