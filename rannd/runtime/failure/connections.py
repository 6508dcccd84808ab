"""The connections of process groups: which they are, and how to cut them.

A rank that waits in a gloo transfer holds no lock and hears nothing, until the connection that it waits for ends.
gloo's own `abort` and `shutdown` do not end it (torch 2.13: the wait goes on), shutting its sockets down does: all
waiting transfers, and all later ones, raise at once. gloo connects all pairs when a group is made, so its sockets
are those that appear meanwhile.
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


class Connections:
    """The groups of a world, and the sockets behind them."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()
        self._groups: list[dist.ProcessGroup] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What is connected inside belongs to the groups."""
        before = _connected()
        yield
        self._sockets |= _connected() - before

    def add(self, group: dist.ProcessGroup | None) -> None:
        """A group made inside of `recording`."""
        if group is not None:
            self._groups.append(group)

    def cut(self) -> None:
        """End all transfers of this rank: those that wait raise, and later ones, too. There is no way back."""
        for descriptor, inode in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino != inode:
                    continue  # closed, and the number is somebody else's by now
                with socket.socket(fileno=os.dup(descriptor)) as end:
                    end.shutdown(socket.SHUT_RDWR)
        for group in self._groups:
            try:
                if torch.cuda.is_available() and "nccl" in dist.get_backend(group):
                    group._get_backend(torch.device("cuda")).abort()
            except (RuntimeError, ValueError) as exc:
                log.get("RaNNCProcess").warning("a group of NCCL cannot be aborted: %s", exc)


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
                    end.getpeername()  # OSError where nobody is at the other end
                    found.add((descriptor, status.st_ino))
    return found
