"""One request and its reply over ZeroMQ, with a deadline."""

from __future__ import annotations

import time

import zmq

from rannd.daemon import protocol
from rannd.daemon.boot import answers
from rannd.errors import DaemonError

PROBE_MS = 200
"""How often a client that waits looks whether the daemon is still there. ZeroMQ itself would wait for ever."""


class GoneError(Exception):
    """The daemon went away before it answered: start it anew and ask again."""


def ask(path: str, request: protocol.Request, deadline: float, version: int = protocol.PROTOCOL) -> protocol.Reply:
    """Send `request` to the daemon at the socket `path` and return its reply.

    Args:
        path: The listening socket.
        request: What to ask.
        deadline: When to give up, in seconds of time.monotonic.
        version: Of the protocol, to speak.

    Raises:
        GoneError: nobody listens at `path` any more.
        DaemonError: no answer in time.
        VersionError: it speaks another version.
        ProtocolError: the answer is not one.
    """
    channel: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    try:
        channel.setsockopt(zmq.LINGER, 0)
        channel.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        channel.connect(f"ipc://{path}")
        channel.send_multipart(protocol.encode(request, version))
        while True:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if channel.poll(max(0, min(PROBE_MS, left_ms))):
                return protocol.decode_reply(channel.recv_multipart(), version)
            if not answers(path):
                raise GoneError
            if left_ms <= 0:
                raise DaemonError(
                    f"the daemon at {path} did not answer in time; raise daemon_timeout_s, or `rannd restart`"
                )
    finally:
        channel.close()
