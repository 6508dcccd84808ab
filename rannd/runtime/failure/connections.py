"""Track the sockets of process groups, and shut them down to abort blocked transfers.

A rank blocked in a gloo transfer cannot be interrupted until the connection ends. gloo's own `abort` and `shutdown` do
not end the wait (torch 2.13), but shutting down its sockets does: all pending and later transfers raise immediately.
gloo connects all pairs when a group is created, so its sockets are those that appear meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from rannd import log
from rannd.device.identity import CUDA, has_accelerator


class Connections:
    """Process groups of a world, and their sockets."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()
        self._groups: list[dist.ProcessGroup] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the sockets connected inside this context as the groups' sockets."""
        before = _connected()
        yield
        self._sockets |= _connected() - before

    def add(self, group: dist.ProcessGroup | None) -> None:
        """Add a process group created inside `recording`."""
        if group is not None:
            self._groups.append(group)

    def cut(self) -> None:
        """Shut down all connections of this rank: pending and later transfers raise. Cannot be undone."""
        for descriptor, inode in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino != inode:
                    continue  # closed, and the descriptor has been reused
                with socket.socket(fileno=os.dup(descriptor)) as end:
                    end.shutdown(socket.SHUT_RDWR)
        for group in self._groups:
            try:
                if has_accelerator() and "nccl" in dist.get_backend(group):
                    group._get_backend(torch.device(CUDA)).abort()
            except (RuntimeError, ValueError) as exc:
                log.get("RaNNCProcess").warning("an NCCL process group cannot be aborted: %s", exc)


def _connected() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's TCP connections."""
    found = set()
    if sys.platform != "linux":
        return set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    end.getpeername()  # OSError if not connected
                    found.add((descriptor, status.st_ino))
    return found
