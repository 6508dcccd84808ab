"""Processes that hold leases or wait for them: who asks, and the kernel's word when one of them dies."""

from __future__ import annotations

import logging
import os
import socket
import struct

import zmq


class Holders:
    """Processes that are watched: each has a descriptor in `poller` that is readable when it has died."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._watched: dict[int, int] = {}
        """Descriptor by pid."""
        self._log = logging.getLogger("rannd.Daemon")

    def watch(self, pid: int, peer: int) -> bool:
        """Be told when process `pid` dies; whether that is possible.

        The kernel's word (`peer`) must be the same: pids of another namespace would name somebody else here.
        """
        if pid in self._watched:
            return True
        if pid != peer:
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError as exc:
            self._log.warning("process %d cannot be watched: %s", pid, exc)
            return False
        self._watched[pid] = fd
        self._poller.register(fd, zmq.POLLIN)
        return True

    def died(self, fd: int) -> int | None:
        """The process whose descriptor is readable, which is watched no more; None where it was forgotten before."""
        pid = next((pid for pid, watched in self._watched.items() if watched == fd), None)
        if pid is not None:
            self._forget(pid)
        return pid

    def keep(self, needed: set[int]) -> None:
        """Watch none but these any more."""
        for pid in self._watched.keys() - needed:
            self._forget(pid)

    def close(self) -> None:
        """Watch nobody any more."""
        self.keep(set())

    def _forget(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._poller.unregister(fd)
        os.close(fd)


def peer_pid(frame: zmq.Frame) -> int:
    """Pid of the process that sent `frame`, 0 where it is in another pid namespace or gone."""
    try:
        fd = os.dup(frame.get(zmq.SRCFD))
    except (OSError, zmq.ZMQError):
        return 0
    try:
        peer = socket.socket(fileno=fd)
    except OSError:  # the client has gone, and its number is that of another file by now
        os.close(fd)
        return 0
    with peer:
        try:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    return int(struct.unpack("3i", credentials)[0])
