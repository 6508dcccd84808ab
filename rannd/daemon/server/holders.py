"""Watches the processes that hold leases or wait for them, so that a lease ends when its holder dies."""

from __future__ import annotations

import logging
import os
import socket
import struct

import zmq

from rannd.daemon.common import descriptors


class Holders:
    """Watched processes: each has a pidfd in `poller`, which becomes readable when the process dies.

    Args:
        poller: Of the server.
        reserve: File descriptors that stay free: with fewer, no further process is watched.
    """

    def __init__(self, poller: zmq.Poller, reserve: int) -> None:
        self._poller = poller
        self._reserve = reserve
        self._watched: dict[int, int] = {}
        """pidfd by pid."""
        self._log = logging.getLogger("rannd.Daemon")

    def watch(self, pid: int, peer: int) -> bool:
        """Start watching process `pid`; return whether that is possible.

        The pid that the kernel reports (`peer`) must be the same: a pid of another namespace would be another process
        here.
        """
        if pid in self._watched:
            return True
        if pid != peer:
            return False
        if (free := descriptors.free()) <= self._reserve:  # they are for clients that libzmq has accepted
            self._log.warning("process %d is not watched: %d file descriptors are free", pid, free)
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
        """Return the process whose pidfd is readable and stop watching it; None if it is no longer watched."""
        pid = next((pid for pid, watched in self._watched.items() if watched == fd), None)
        if pid is not None:
            self._forget(pid)
        return pid

    def keep(self, needed: set[int]) -> None:
        """Stop watching all processes but these."""
        for pid in self._watched.keys() - needed:
            self._forget(pid)

    def close(self) -> None:
        """Stop watching all processes."""
        self.keep(set())

    def _forget(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._poller.unregister(fd)
        os.close(fd)


def peer_pid(frame: zmq.Frame) -> int:
    """Return the pid of the process that sent `frame`, 0 if it is in another pid namespace or gone."""
    try:
        fd = os.dup(frame.get(zmq.SRCFD))
    except (OSError, zmq.ZMQError):
        return 0
    try:
        peer = socket.socket(fileno=fd)
    except OSError:  # the client is gone, and its descriptor number now belongs to another file
        os.close(fd)
        return 0
    with peer:
        try:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    return int(struct.unpack("3i", credentials)[0])
