"""Sends requests over ZeroMQ and receives replies, with a deadline."""

from __future__ import annotations

import os
import select
import socket
import time

import zmq

from rannd.daemon.common import descriptors, protocol
from rannd.daemon.common.listening import answers
from rannd.errors import DaemonError

PROBE_MS = 200
"""Interval at which a waiting client checks that the daemon is still there. ZeroMQ itself would wait for ever."""

LAST_MS = 20
"""Maximum time that a reply takes inside this process, from the connection to the waiting thread."""

DESCRIPTORS = 16
"""Free descriptors without which no connection is opened. ZeroMQ takes seven for the first; the rest is a margin."""


class GoneError(Exception):
    """The daemon disappeared before it replied: start it again and repeat the request."""


class Line:
    """A connection to the daemon, for one request after another. Used by one thread at a time.

    After an error of `ask` it must not be used again: a late reply would be taken for that of the next request.
    """

    def __init__(self, path: str) -> None:
        """Connect to the listening socket at `path`; an error of the daemon shows only in `ask`.

        Raises:
            DaemonError: This process has too few file descriptors left.
        """
        descriptors.require(DESCRIPTORS, "a connection to the daemon")
        self._path = path
        self._pid = os.getpid()
        self._peer: socket.socket | None = None
        """The connection below ZeroMQ, known after the first reply."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        try:
            self._socket.connect(f"ipc://{path}")
        except BaseException:
            self._socket.close()
            raise

    @property
    def up(self) -> bool:
        """Whether this process has received a reply over this connection, and the daemon has not closed it since."""
        return self._pid == os.getpid() and self._peer is not None and not self._hung_up()

    def ask(self, request: protocol.Request, deadline: float, version: int = protocol.PROTOCOL) -> protocol.Reply:
        """Send `request` and return its reply.

        Args:
            request: The request.
            deadline: When to give up, in seconds of time.monotonic.
            version: Protocol version of the message.

        Raises:
            GoneError: The daemon closed the connection.
            DaemonError: No reply in time.
            VersionError: The daemon speaks another version.
            ProtocolError: The reply is invalid.
        """
        self._socket.send_multipart(protocol.encode(request, version))
        while True:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if self._wait(max(0, min(PROBE_MS, left_ms))):
                frames = self._socket.recv_multipart(copy=False)
                if self._peer is None:
                    self._peer = _connection(frames[-1], self._path)
                return protocol.decode_reply([frame.bytes for frame in frames], version)
            if self._hung_up() or not answers(self._path):
                raise GoneError
            if left_ms <= 0:
                raise DaemonError(
                    f"the daemon at {self._path} did not answer in time (its log may say why); raise "
                    "daemon_timeout_s, or `rannd restart`"
                )

    def _wait(self, patience_ms: int) -> bool:
        """Wait for a reply or a hang-up; return whether there is a reply."""
        if self._peer is None:
            return bool(self._socket.poll(patience_ms))
        zmq.zmq_poll([(self._socket, zmq.POLLIN), (self._peer, zmq.POLLERR)], patience_ms)
        # A last reply may still be on its way through ZeroMQ's thread.
        return bool(self._socket.poll(LAST_MS if self._hung_up() else 0))

    def close(self) -> None:
        """Close the connection. In a forked process it stays open for the parent."""
        if self._peer is not None:
            self._peer.close()
        self._socket.close()  # pyzmq leaves a parent's socket alone

    def _hung_up(self) -> bool:
        if self._peer is None:
            return False
        poller = select.poll()
        poller.register(self._peer, 0)  # hang-ups are always reported
        return bool(poller.poll(0))


def ask(path: str, request: protocol.Request, deadline: float, version: int = protocol.PROTOCOL) -> protocol.Reply:
    """Send one request to the daemon at the socket `path` and return its reply, see `Line.ask`."""
    line = Line(path)
    try:
        return line.ask(request, deadline, version)
    finally:
        line.close()


def _connection(frame: zmq.Frame, path: str) -> socket.socket | None:
    """Return the connection to `path` that `frame` came over, None if it has been closed."""
    try:
        peer = socket.socket(fileno=os.dup(frame.get(zmq.SRCFD)))
    except (OSError, zmq.ZMQError):
        return None
    try:
        found = peer.getpeername()
    except OSError:
        found = None
    if found != path:  # the descriptor number now belongs to another file, which must not be kept open
        peer.close()
        return None
    return peer
