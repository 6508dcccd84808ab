"""The socket between a rank's watcher and the monitor: where it listens, how it is reached, who may come.

On one machine an abstract AF_UNIX name, with the user at the other end checked on both sides; where ranks run on
other machines TCP, with a token that only the job knows. Standard library only: the watcher runs without
site-packages.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys

from rannd.errors import LaunchError
from rannd.lost_host import look_out


class Listener:
    """Where the ranks' watchers connect: an abstract AF_UNIX name, or TCP where a host is another machine.

    Args:
        remote_host: one of the other machines, None when all ranks run on this one.

    Raises:
        LaunchError: there is no way to that machine.
    """

    def __init__(self, remote_host: str | None) -> None:
        self.token = secrets.token_hex(16)
        self.address: list[str | int]
        if remote_host is None:
            # No file: nothing is left behind by a SIGKILL, nothing lies in a world-writable place.
            name = f"rannc-run-{secrets.token_hex(16)}"
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.bind("\0" + name)
            self.address = ["unix", name]
        else:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            local = address_towards(remote_host)
            self.socket.bind(("", 0))
            self.address = ["tcp", local, self.socket.getsockname()[1]]
        self.socket.listen(1024)
        self.socket.setblocking(False)

    def accept(self) -> socket.socket | None:
        """The next connection, None where there is none or it is another user's."""
        try:
            channel, _ = self.socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        if channel.family == socket.AF_UNIX and peer_uid(channel) != os.getuid():
            channel.close()
            return None
        if channel.family != socket.AF_UNIX:
            look_out(channel, reads_at_once=True)
        channel.setblocking(False)
        return channel


def address_towards(host: str) -> str:
    """The address that this machine shows to another one.

    Raises:
        LaunchError: there is no way to that machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be a name
            raise LaunchError(f"host {host} cannot be reached: {error}; is its name right?") from None
        address: str = probe.getsockname()[0]
        return address


def connect(address: list[str | int]) -> socket.socket:
    """A socket to the monitor.

    Args:
        address: ``["unix", name]`` (a name in the abstract namespace) or ``["tcp", host, port]``.

    Raises:
        OSError: nobody listens there, or a process of another user does.
    """
    if address[0] == "unix":
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.connect("\0" + str(address[1]))
        uid = peer_uid(channel)
        if uid != os.getuid():
            raise PermissionError(f"the monitor's socket belongs to user {uid}, not to {os.getuid()}")
        return channel
    channel = socket.create_connection((str(address[1]), int(address[2])), timeout=30)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    look_out(channel, reads_at_once=False)  # a user may stop to read what rannc-run prints
    return channel


def peer_uid(channel: socket.socket) -> int:
    """The user at the other end of a connected AF_UNIX socket."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)
