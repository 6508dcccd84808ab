"""Processes that come and go beside a measurement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = """
import random, time
memory = bytearray(64 << 20)
while True:
    until = time.monotonic() + 1.5 * random.random()
    while time.monotonic() < until:
        memory[::64] = memory[::64]
    time.sleep(random.random())
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Context manager with processes that compute in 64 MB for up to 1.5 s, and pause for up to 1 s, at random."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
