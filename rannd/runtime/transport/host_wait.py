"""Waiting on the host for collectives.

A processor with nothing to do sleeps, and to wake it may take longer, in a virtual machine above all, than a collective
of a small model. So a rank that has processors of its own asks for a short while whether one is done,
before it sleeps. MPI's implementations wait in this way. gloo does not tell of a single message whether it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

import torch.distributed as dist

POLL_S = 0.002
"""How long is asked; then sleeping is worth what it saves."""

_polls = False


def wait(work: dist.Work) -> None:
    """Wait for a collective of hosts, as ``work.wait()``."""
    if _polls and not work.is_completed():
        until = time.perf_counter() + POLL_S
        while not work.is_completed() and time.perf_counter() < until:
            os.sched_yield()  # gloo's threads may have no other processor
    work.wait()


def poll(yes: bool) -> None:
    """Set whether this process asks before it sleeps."""
    global _polls
    _polls = yes


def suffices(mine: Collection[int], everyone: Iterable[Collection[int]]) -> bool:
    """Whether there is a processor for each rank that may run on one of this rank's.

    Args:
        mine: Processors that this rank may run on.
        everyone: The same of all ranks of its node, itself among them.
    """
    own = set(mine)
    return sum(not own.isdisjoint(each) for each in everyone) <= len(own)
