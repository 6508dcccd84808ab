"""Sockets between the watcher of a rank and the monitor: creation, addresses, and access checks.

On one machine an abstract AF_UNIX name, with the peer's user checked on both sides; if ranks run on other machines TCP,
at the address that these machines use. Both sides prove that they know the job's token (rannd.ranks.admission).
Standard library only: the watcher runs without site-packages.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable

from rannd.errors import LaunchError
from rannd.ranks.admission import TURN_S, Reception, admitted, new_token, peer_uid
from rannd.ranks.host_name import addresses_towards
from rannd.ranks.lost_host import look_out

BACKLOG = 1024
"""Connections that wait in the kernel."""


class Listener:
    """Listening socket for the ranks' watchers: an abstract AF_UNIX name, or TCP if a host is another machine.

    Args:
        remote_host: One of the other machines, None if all ranks run on this one.

    Raises:
        LaunchError: There is no route to that machine.
    """

    def __init__(self, remote_host: str | None) -> None:
        self.token = new_token()
        self.address: list[str | int]
        if remote_host is None:
            # Abstract: a SIGKILL leaves no file behind, and there is no file in a world-writable place.
            name = f"rannc-run-{secrets.token_hex(16)}"
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.bind("\0" + name)
            self.socket.listen(BACKLOG)
            self.address = ["unix", name]
        else:
            self.socket = listen_towards(remote_host)
            self.address = ["tcp", *self.socket.getsockname()[:2]]

    def reception(self, say: Callable[[str], None]) -> Reception:
        """Return what admits the watchers; it closes the socket. `say` gets a line for the user."""
        return Reception(self.socket, self.token, say)


def prepare(channel: socket.socket) -> bool:
    """Prepare the monitor's end of an admitted connection; False: it has ended."""
    if channel.family != socket.AF_UNIX:
        try:
            look_out(channel, reads_at_once=True)
        except OSError:
            return False
    return True


def address_towards(host: str) -> str:
    """Return the address of this machine as seen from another one.

    Raises:
        LaunchError: There is no route to that machine.
    """
    try:
        found = addresses_towards(host)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise LaunchError(f"host {host} cannot be reached: {error}; check its name") from None
    if not found:
        raise LaunchError(f"host {host} cannot be reached: there is no route to it; check its name")
    return found[0]


def listen_towards(host: str) -> socket.socket:
    """Listen on a free port of `address_towards` a host.

    Raises:
        LaunchError: There is no route to that machine.
    """
    address = address_towards(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def connect(address: list[str | int], token: str) -> socket.socket:
    """Connect to the monitor.

    Args:
        address: ``["unix", name]`` (a name in the abstract namespace) or ``["tcp", host, port]``.
        token: The job's token.

    Raises:
        OSError: Nothing listens there, or not this job's monitor.
    """
    return admitted(lambda: _connected(address), token)


def _connected(address: list[str | int]) -> socket.socket:
    if address[0] == "unix":
        channel = socket.socket(socket.AF_UNIX)
    else:
        channel = socket.create_connection((str(address[1]), int(address[2])), timeout=30)
    try:
        if channel.family == socket.AF_UNIX:
            _reach(channel, "\0" + str(address[1]))
        else:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            look_out(channel, reads_at_once=False)  # a user may pause rannc-run's output
    except OSError:
        channel.close()
        raise
    return channel


def _reach(channel: socket.socket, name: str) -> None:
    """Connect to a monitor of this user."""
    # While the queue is full, connect waits, by default without end, and with a timeout of Python's not at all.
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TURN_S), 0))
    try:
        channel.connect(name)
    except BlockingIOError:
        raise TimeoutError(errno.ETIMEDOUT, f"rannc-run does not accept connections for {TURN_S:g} s") from None
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    uid = peer_uid(channel)
    if uid != os.getuid():
        raise PermissionError(f"the monitor's socket belongs to user {uid}, not to {os.getuid()}")
