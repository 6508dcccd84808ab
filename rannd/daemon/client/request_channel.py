"""Requests and their replies over ZeroMQ, with a deadline."""

from __future__ import annotations

import os
import select
import socket
import time

import zmq

from rannd.daemon.common import protocol
from rannd.daemon.common.listening import answers
from rannd.errors import DaemonError

PROBE_MS = 200
"""How often a client that waits looks whether the daemon is still there. ZeroMQ itself would wait for ever."""

LAST_MS = 20
"""How long an answer may take from the connection to whoever waits for it, in this process."""


class GoneError(Exception):
    """The daemon went away before it answered: start it anew and ask again."""


class Line:
    """A connection to the daemon, for one request after another. One thread at a time.

    After an error of `ask` it is of no use any more: a late answer would be taken for that of the next request.
    """

    def __init__(self, path: str) -> None:
        """Connect to the listening socket at `path`; whether anybody is there shows in `ask`."""
        self._path = path
        self._pid = os.getpid()
        self._peer: socket.socket | None = None
        """The connection below ZeroMQ, known with the first answer."""
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
        """Whether this process has had an answer over it, and the daemon has not hung up since."""
        return self._pid == os.getpid() and self._peer is not None and not self._hung_up()

    def ask(self, request: protocol.Request, deadline: float, version: int = protocol.PROTOCOL) -> protocol.Reply:
        """Send `request` and return its reply.

        Args:
            request: What to ask.
            deadline: When to give up, in seconds of time.monotonic.
            version: Of the protocol, to speak.

        Raises:
            GoneError: nobody is at the other end any more.
            DaemonError: no answer in time.
            VersionError: it speaks another version.
            ProtocolError: the answer is not one.
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
                    f"the daemon at {self._path} did not answer in time; raise daemon_timeout_s, or `rannd restart`"
                )

    def _wait(self, patience_ms: int) -> bool:
        """Wait for an answer or a hang-up; whether there is an answer."""
        if self._peer is None:
            return bool(self._socket.poll(patience_ms))
        zmq.zmq_poll([(self._socket, zmq.POLLIN), (self._peer, zmq.POLLERR)], patience_ms)
        # A last answer may still be on its way through ZeroMQ's thread.
        return bool(self._socket.poll(LAST_MS if self._hung_up() else 0))

    def close(self) -> None:
        """Hang up. In a forked process the connection stays its parent's."""
        if self._peer is not None:
            self._peer.close()
        self._socket.close()  # of a parent: pyzmq leaves it alone

    def _hung_up(self) -> bool:
        if self._peer is None:
            return False
        poller = select.poll()
        poller.register(self._peer, 0)  # a hang-up is told always
        return bool(poller.poll(0))


def ask(path: str, request: protocol.Request, deadline: float, version: int = protocol.PROTOCOL) -> protocol.Reply:
    """Send one request to the daemon at the socket `path` and return its reply, as `Line.ask` does."""
    line = Line(path)
    try:
        return line.ask(request, deadline, version)
    finally:
        line.close()


def _connection(frame: zmq.Frame, path: str) -> socket.socket | None:
    """The connection to `path` that `frame` came over, None where it has ended by now."""
    try:
        peer = socket.socket(fileno=os.dup(frame.get(zmq.SRCFD)))
    except (OSError, zmq.ZMQError):
        return None
    try:
        found = peer.getpeername()
    except OSError:
        found = None
    if found != path:  # the number was given to another file meanwhile, which must not be kept open
        peer.close()
        return None
    return peer
