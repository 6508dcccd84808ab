"""Checks whether a daemon listens, with the standard library only."""

from __future__ import annotations

import socket


def answers(path: str) -> bool:
    """Whether a process listens at the socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # it listens, but its queue is full
        except OSError:
            return False
    return True
