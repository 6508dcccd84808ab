"""Who may talk to a process of a job that listens: peers that know the job's token. Both sides prove it, none sends it.

::

    who connects                                   who listens
         ◄──────────────── nonce of the listener ──────
         ── nonce of its own, HMAC("connects", both) ──►     anything else, or nothing within `ANSWER_S`: closed;
                                                             within `PATIENCE_S`, if others wait for its place
         ◄──────────────── HMAC("listens", both) ──────

Any program may connect to a TCP port. Until it has proved that it knows the token, no more than `_ANSWER` bytes of it
are read, nothing of them is decoded, and it counts among at most `MOST_STRANGERS` connections; others wait in the
kernel's queue. What another user connects to an AF_UNIX socket is closed at once. Standard library only: the ranks'
watchers run without site-packages.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import math
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable

ANSWER_S = 5.0
"""Seconds that a peer gets for its answer."""
PATIENCE_S = 1.0
"""Seconds after which a peer without an answer loses its place if all places are taken and another one waits."""
MOST_STRANGERS = 64
"""Maximum number of connections that have not answered yet."""
TURN_S = 60.0
"""Seconds that a peer waits for its turn: strangers may be before it in the queue."""
PAUSE_S = 1.0
"""Seconds without new connections if this process cannot have more."""

_NONCE, _DIGEST = 32, hashlib.sha256().digest_size
_ANSWER = _NONCE + _DIGEST
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept that tell of this process or machine, and come again at once; others tell of the peer."""


class NotAdmittedError(OSError):
    """The other end of a connection is no process of this job, or does not take this one for one."""


def new_token() -> str:
    """Return the token of a new job."""
    return secrets.token_hex(32)


def admitted(connect: Callable[[], socket.socket], token: str) -> socket.socket:
    """Connect to a listener until it has admitted this process.

    It closes the connection of an honest peer that is too slow while strangers want its place (`PATIENCE_S`). Then
    another connection is made; not if it was closed at once, which is the answer to another token.

    Args:
        connect: Makes a connection.
        token: The token of the job.

    Raises:
        OSError: As `introduce` and `connect`; all connections together take no more than `TURN_S`.
    """
    until = time.monotonic() + TURN_S
    while True:
        since = time.monotonic()
        channel = connect()
        try:
            introduce(channel, token, until)
            return channel
        except OSError as exc:
            channel.close()
            at_once = time.monotonic() - since < PATIENCE_S
            if at_once or time.monotonic() >= until or not isinstance(exc, NotAdmittedError | ConnectionError):
                raise


def introduce(channel: socket.socket, token: str, until: float = math.inf) -> None:
    """Prove to a listener that this process knows the token, and have it prove the same. Blocks until it has.

    Args:
        channel: A connected socket, whose timeout is kept.
        token: The token of the job.
        until: Moment of time.monotonic() at which it gives up, if it is before the end of `TURN_S`.

    Raises:
        NotAdmittedError: The listener does not know the token, or refuses this process.
        OSError: The connection failed, or the listener has not answered within `TURN_S`.
    """
    before, until = channel.gettimeout(), min(until, time.monotonic() + TURN_S)
    theirs, mine = _receive(channel, _NONCE, until), secrets.token_bytes(_NONCE)
    channel.sendall(mine + _proof(token, b"connects", theirs, mine))
    if not hmac.compare_digest(_receive(channel, _DIGEST, until), _proof(token, b"listens", theirs, mine)):
        raise NotAdmittedError("what listens there does not know this job's token")
    channel.settimeout(before)


def _receive(channel: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        left = until - time.monotonic()
        if left <= 0:  # each part in time is not all in time
            raise TimeoutError(errno.ETIMEDOUT, f"what listens there has not answered within {TURN_S:g} s")
        channel.settimeout(left)
        part = channel.recv(size - len(data))
        if not part:
            raise NotAdmittedError(
                "what listens there has closed the connection: it is of another job, or this one has ended"
            )
        data += part
    return data


def _proof(token: str, side: bytes, listeners: bytes, connecting: bytes) -> bytes:
    return hmac.digest(token.encode(), side + listeners + connecting, "sha256")


def peer_uid(channel: socket.socket) -> int:
    """Return the user id at the other end of a connected AF_UNIX socket."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


class _Stranger:
    """A peer that has not proved anything yet. No dataclass: their import would slow every watcher's start."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.since = time.monotonic()
        self.until = self.since + ANSWER_S
        self.nonce = secrets.token_bytes(_NONCE)
        self.answer = bytearray()


class Reception:
    """A listening socket, and the peers that have connected to it but have not proved that they know the token.

    One descriptor (`fileno`) becomes readable when there is something to do; then, and when `due` is over, `admit` does
    it.

    Args:
        listener: The listening socket; closed with the reception.
        token: The token of the job.
        say: Told once if this process cannot accept connections because it, or the machine, has too many files open.
    """

    def __init__(self, listener: socket.socket, token: str, say: Callable[[str], None]) -> None:
        self.listener = listener
        self._token = token
        self._say = say
        self._said = False
        self._strangers: dict[_Stranger, None] = {}  # a set, the oldest first
        self._accepts = False
        self._paused_until = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._listen()

    @property
    def waiting(self) -> int:
        """Number of peers that have not answered yet."""
        return len(self._strangers)

    def fileno(self) -> int:
        """Descriptor that is readable if `admit` has something to do."""
        return self._selector.fileno()  # epoll's and kqueue's have it

    def due(self) -> float | None:
        """Seconds after which `admit` has to be called in any case; None: not before there is something to read."""
        moments = [stranger.until for stranger in self._strangers]
        if self._paused_until:
            moments.append(self._paused_until)
        elif self._strangers and not self._accepts:
            moments.append(self._oldest().since + PATIENCE_S)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def admit(self) -> list[socket.socket]:
        """Accept connections, read answers, close who is too late; return new connections to processes of the job.

        They are non-blocking.
        """
        found, knocks = [], False
        for key, _ in self._selector.select(0):
            if key.fileobj is self.listener:
                knocks = True
            elif self._hear(key.data):
                found.append(key.data.channel)
        if knocks:  # who has answered meanwhile has not lost its place
            self._accept()
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if now >= stranger.until]:
            self._dismiss(stranger)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
        self._listen()
        return found

    def close(self) -> None:
        """Close the listener and all connections that were not admitted."""
        self._selector.close()  # of a forked child, this closes its copies only
        self.listener.close()
        for stranger in self._strangers:
            stranger.channel.close()
        self._strangers.clear()

    def _listen(self) -> None:
        """Accept connections or leave them in the kernel's queue, whichever is due."""
        wanted = not self._paused_until and self._has_room()
        if wanted and not self._accepts:
            self._selector.register(self.listener, selectors.EVENT_READ)
        elif not wanted and self._accepts:
            self._selector.unregister(self.listener)
        self._accepts = wanted

    def _has_room(self) -> bool:
        return len(self._strangers) < MOST_STRANGERS or time.monotonic() >= self._oldest().since + PATIENCE_S

    def _oldest(self) -> _Stranger:
        return next(iter(self._strangers))

    def _accept(self) -> None:
        ended = 0
        for _ in range(MOST_STRANGERS):  # not until nobody comes: peers that go at once may come without end
            if not self._has_room():
                return
            try:
                channel, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                ended += 1
                if exc.errno not in _NO_ROOM and ended < MOST_STRANGERS:
                    continue  # the end of that peer: the kernel has removed it from the queue
                self._paused_until = time.monotonic() + PAUSE_S
                if not self._said:
                    self._said = True
                    why = os.strerror(exc.errno or 0)
                    self._say(f"a connection cannot be accepted: {why}; trying again each {PAUSE_S:g} s")
                return
            if channel.family == socket.AF_UNIX and peer_uid(channel) != os.getuid():
                channel.close()  # at once: another user gets none of the places
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                self._dismiss(self._oldest())
            stranger = _Stranger(channel)
            self._strangers[stranger] = None
            try:
                channel.setblocking(False)
                self._selector.register(channel, selectors.EVENT_READ, stranger)
                _send(channel, stranger.nonce)
            except OSError:
                self._dismiss(stranger)

    def _hear(self, stranger: _Stranger) -> bool:
        """Read of a peer's answer what has come; return whether it is complete and right."""
        try:
            part = stranger.channel.recv(_ANSWER - len(stranger.answer))
            if not part:
                raise NotAdmittedError("it has gone")
            stranger.answer += part
            if len(stranger.answer) < _ANSWER:
                return False
            mine, proof = bytes(stranger.answer[:_NONCE]), bytes(stranger.answer[_NONCE:])
            if not hmac.compare_digest(proof, _proof(self._token, b"connects", stranger.nonce, mine)):
                raise NotAdmittedError("it does not know the token")
            _send(stranger.channel, _proof(self._token, b"listens", stranger.nonce, mine))
        except BlockingIOError:
            return False
        except OSError:
            self._dismiss(stranger)
            return False
        self._strangers.pop(stranger, None)
        self._selector.unregister(stranger.channel)
        return True

    def _dismiss(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(stranger.channel)
        stranger.channel.close()


def _send(channel: socket.socket, data: bytes) -> None:
    """Send a few bytes that fit into the buffer of a new connection."""
    if channel.send(data) < len(data):
        raise NotAdmittedError("it does not read")
