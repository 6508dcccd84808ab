"""Side channel between ranks: TCP connections that carry failure reports while ranks wait for each other.

The connections form a star: every rank's watcher thread is connected to the hub in rank 0's watcher thread. Nothing is
sent during normal operation; the kernel notices when a rank's process or its machine is gone (by keepalive probes, see
`rannd.ranks.lost_host`). On one machine the hub listens on the loopback interface only. Rank and hub prove to each
other that they know a token, which the ranks received through their process group (rannd.ranks.admission).

A frame is its length (4 bytes, big-endian) and a msgpack message, an array that starts with the message's name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import psutil

from rannd.ranks.admission import admitted
from rannd.ranks.lost_host import look_out
from rannd.runtime.failure.failure_report import Failure

MOST_BYTES = 16 << 20
"""Maximum frame size; longer frames are rejected."""
CONNECT_S = 5.0


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages."""


class RankHello(Message, frozen=True):
    """First message of a rank."""

    rank: int
    host: str
    pid: int


class Told(Message, frozen=True):
    """To the hub: this rank has failed. From the hub: the job has failed."""

    failure: Failure


class Forgiven(Message, frozen=True):
    """From the hub: all ranks raised an error before they ran anything, so they are still in sync."""


class Left(Message, frozen=True):
    """To the hub: this rank's script ends normally, after `calls` calls of rannd. From the hub: `rank` does."""

    rank: int
    calls: int


class Gone(Message, frozen=True):
    """From the hub: the connection to a rank has ended."""

    rank: int


class Heard(Message, frozen=True):
    """To the hub: this rank has reported the failure. From the hub: all ranks have."""


class Stuck(Message, frozen=True):
    """To the hub: this rank has been waiting for others for too long."""

    rank: int
    seconds: float


class Waits(Message, frozen=True):
    """To the hub: this rank has been waiting for others for `wait_notice_s`; all that follows is a line of the log."""

    rank: int


class Ask(Message, frozen=True):
    """From the hub: request for the rank's activity, and for its stacks if they will be shown."""

    number: int
    stacks: bool


class Stacks(Message, frozen=True):
    """To the hub: the answer to Ask."""

    number: int
    doing: str
    place: str
    line: str
    stacks: str
    call: str
    """Function of rannd that the script has called, '' if none."""
    line_of_user: str
    """The innermost line of the user's code."""
    activity: str
    still: float
    """Seconds for which the rank has made no progress."""


AnyMessage: TypeAlias = RankHello | Told | Forgiven | Left | Gone | Heard | Stuck | Waits | Ask | Stacks

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class ChannelError(Exception):
    """Invalid data was received."""


class Channel:
    """One end of a connection. Sending is thread-safe; only the watcher thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._incoming = bytearray()
        self._sending = threading.Lock()
        end.setblocking(True)
        end.settimeout(CONNECT_S)  # applies to sends; receives happen only when data is available

    def send(self, message: AnyMessage) -> None:
        """Send a message; an error ends the connection, which `receive` notices on both sides."""
        data = _encoder.encode(message)
        with self._sending, contextlib.suppress(OSError):
            try:
                self.socket.sendall(struct.pack(">I", len(data)) + data)
            except OSError:  # a part of the frame may be out: the next one would be read as its rest
                self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[AnyMessage] | None:
        """Receive messages from a readable socket; None if the connection has ended.

        ChannelError for invalid data.
        """
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self._incoming += data
        found: list[AnyMessage] = []
        while len(self._incoming) >= 4:
            (size,) = struct.unpack_from(">I", self._incoming)
            if size > MOST_BYTES:
                raise ChannelError(f"a frame of {size} bytes")
            if len(self._incoming) < 4 + size:
                break
            try:
                found.append(_decoder.decode(self._incoming[4 : 4 + size]))
            except (msgspec.DecodeError, ValueError, RecursionError) as exc:  # not UTF-8; a nesting that is too deep
                raise ChannelError(str(exc)) from exc
            del self._incoming[: 4 + size]
        return found

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def listen(alone: bool) -> socket.socket:
    """Create the hub's listening socket; `alone`: all ranks are on this machine."""
    if alone:
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def addresses(alone: bool) -> list[str]:
    """IP addresses of this machine, the most likely reachable one first."""
    if alone:
        return ["127.0.0.1"]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or ""
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or "%" in entry.address:
                continue
            address = ipaddress.ip_address(entry.address)
            if not address.is_loopback and not address.is_link_local:
                found.append((name != wanted, address.version, entry.address))
    return [address for _, _, address in sorted(found)]


def connect(places: Sequence[str], port: int, token: str) -> Channel | None:
    """Connect to the hub; None if it does not answer at any of its addresses (another machine may have the same)."""
    for place in places:
        with contextlib.suppress(OSError):
            end = admitted(partial(socket.create_connection, (place, port), timeout=CONNECT_S), token)
            try:
                prepare(end)
            except OSError:
                end.close()
                raise
            return Channel(end)
    return None


def prepare(end: socket.socket) -> None:
    """Set TCP_NODELAY and keepalive probes."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    look_out(end, reads_at_once=True)
