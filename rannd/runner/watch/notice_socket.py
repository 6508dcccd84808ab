"""Where a running elastic job is told that a host is going away: an abstract AF_UNIX socket on each of its machines.

::

    rannc-run notify-preempt c          rannc-run (the whole job), or, on other machines,
                                        the watcher of a rank, which asks the monitor
         ── NOTICE {"host", "seconds"} ──►
         ◄── NOTICED {"taken", "text"} ──

The messages are frames of wire.py, one each way. Both sides ask the kernel for the user at the other end, and talk to
their own user alone. The name of a socket has a random part, so that nobody can take it before. Standard library only:
the watchers run without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from typing import NamedTuple

from rannd.ranks.admission import peer_uid
from rannd.runner.watch import wire

PREFIX = "rannd-notices"
LONGEST = 4096
"""Maximum bytes of a notice with its header."""
LONGEST_ANSWER = 1000
"""Maximum characters of an answer's text: it has to fit into the buffer of a socket."""
MOST_GUESTS = 16
"""Maximum number of connections; others wait in the kernel's queue."""
PATIENCE_S = 5.0
"""Seconds that a guest gets to say its notice."""
MOST_S = 1e6
"""Seconds of the longest notice, eleven days."""
PAUSE_S = 1.0
"""Seconds without new connections if this process cannot have more."""


class Notice(NamedTuple):
    """A host is going away."""

    host: str
    """Its name; '': the machine on which the notice was given."""
    seconds: float
    """Seconds until it goes."""


class Noticed(NamedTuple):
    """What a job answers."""

    taken: bool
    """Whether it does something about it."""
    text: str
    """What it does, or why it does nothing; at most `LONGEST_ANSWER` characters."""


def own_prefix() -> str:
    """Return how the names of this user's sockets begin."""
    return f"{PREFIX}-{os.getuid()}-"


def decode_notice(payload: bytes) -> Notice:
    """Decode the payload of a NOTICE.

    Raises:
        WireError: It is none.
    """
    fields = wire.decode_json(payload)
    host, seconds = fields.get("host"), fields.get("seconds")
    if not isinstance(host, str) or len(host) > 255 or not host.isprintable():
        raise wire.WireError(f"a notice for the host {host!r:.300}")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_S:  # nor NaN
        raise wire.WireError(f"a notice of {seconds!r:.300} seconds")
    return Notice(host, float(seconds))


def decode_noticed(payload: bytes) -> Noticed:
    """Decode the payload of a NOTICED.

    Raises:
        WireError: It is none.
    """
    fields = wire.decode_json(payload)
    taken, text = fields.get("taken"), fields.get("text")
    if type(taken) is not bool or not isinstance(text, str):
        raise wire.WireError(f"an answer to a notice that is none: {fields!r:.300}")
    return Noticed(taken, text)


class _Guest:
    """A connection to who gives a notice. No dataclass: their import would slow every watcher's start."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.until = time.monotonic() + PATIENCE_S
        self.said = bytearray()
        self.asked = False
        """It has said its notice, and waits for the answer."""


class NoticeSocket:
    """Listens for notices; nothing here waits.

    Raises:
        OSError: The socket cannot be made.
    """

    def __init__(self) -> None:
        self.name = f"{own_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind("\0" + self.name)
            self._listener.listen(MOST_GUESTS)
        except OSError:
            self._listener.close()
            raise
        self._guests: list[_Guest] = []
        self._asked: list[_Guest] = []
        """Those that wait for an answer, the first that asked first."""
        self._paused_until = 0.0

    def descriptors(self) -> list[int]:
        """Return what becomes readable when `hear` has something to do."""
        found = [guest.channel.fileno() for guest in self._guests if not guest.asked]
        return [*found, self._listener.fileno()] if self._accepts() else found

    def hear(self) -> list[Notice]:
        """Return the notices that have come. Each has to be answered, in their order.

        To be called when one of `descriptors` is readable, and from time to time.
        """
        self._accept()
        found = []
        for guest in [guest for guest in self._guests if not guest.asked]:
            try:
                notice = self._read(guest)
            except (OSError, wire.WireError):  # it has gone, is too late, or says something else
                self._dismiss(guest)
                continue
            if notice is not None:
                guest.asked = True
                self._asked.append(guest)
                found.append(notice)
        return found

    def answer(self, answer: Noticed) -> None:
        """Answer the first of the notices that have no answer yet."""
        if not self._asked:
            return
        guest = self._asked.pop(0)
        with contextlib.suppress(OSError):  # it has gone; what is done about its notice is done all the same
            guest.channel.send(wire.encode_json(wire.NOTICED, **answer._asdict()))  # fits into the buffer
        self._dismiss(guest)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for guest in self._guests:
            guest.channel.close()
        self._guests, self._asked = [], []

    def _accepts(self) -> bool:
        return len(self._guests) < MOST_GUESTS and time.monotonic() >= self._paused_until

    def _accept(self) -> None:
        while self._accepts():
            try:
                channel, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files: the listener stays readable
                self._paused_until = time.monotonic() + PAUSE_S
                return
            try:
                own = peer_uid(channel) == os.getuid()
                channel.setblocking(False)
            except OSError:
                own = False
            if own:
                self._guests.append(_Guest(channel))
            else:
                channel.close()  # at once: another user gets none of the places

    def _read(self, guest: _Guest) -> Notice | None:
        """Read what a guest has said so far; return its notice if that is all of one, and nothing else."""
        try:
            part = guest.channel.recv(LONGEST + 1 - len(guest.said))
        except BlockingIOError:
            if time.monotonic() >= guest.until:
                raise wire.WireError("it says nothing") from None
            return None
        guest.said += part
        if not part or len(guest.said) > LONGEST:
            raise wire.WireError("it has gone, or says too much")
        frames = list(wire.FrameReader().feed(bytes(guest.said)))
        if not frames:
            return None
        kind, payload = frames[0]
        if kind != wire.NOTICE:
            raise wire.WireError(f"{kind!r} is no notice")
        return decode_notice(payload)

    def _dismiss(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        guest.channel.close()


def listeners() -> list[str]:
    """Return the names of this user's sockets that listen in this network namespace.

    Raises:
        OSError: The kernel does not list them: this is no Linux.
    """
    found = set()
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            # Num RefCount Protocol Flags Type St Inode Path; an abstract path begins with @.
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[7].startswith("@" + own_prefix()):
                found.add(fields[7][1:].rstrip("\n"))
    return sorted(found)


def ask(name: str, notice: Notice, seconds: float) -> Noticed | None:
    """Give a notice to what listens at a name; return the answer, None if that is another user.

    Raises:
        OSError: Nothing listens there any more, or there is no answer within `seconds`.
        WireError: The answer is none.
    """
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(seconds)
        channel.connect("\0" + name)
        if peer_uid(channel) != os.getuid():
            return None
        channel.sendall(wire.encode_json(wire.NOTICE, **notice._asdict()))
        reader = wire.FrameReader()
        while True:
            channel.settimeout(max(0.01, until - time.monotonic()))
            data = channel.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it has ended without an answer")
            for kind, payload in reader.feed(data):
                if kind != wire.NOTICED:
                    raise wire.WireError(f"{kind!r} is no answer to a notice")
                return decode_noticed(payload)
