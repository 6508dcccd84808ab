"""Strangers on a port of a job: what somebody who does not know the token may send, and what they get for it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Sequence

from rannd.ranks.admission import _DIGEST, _NONCE, _proof, new_token

SEED = int(os.environ["TEST_SEED"])
LONG_S = 60.0
"""Far above what an answer takes on a busy machine."""
MOST_BYTES = 1 << 16
"""Of one stranger."""


class Strangers:
    """Peers that connect, answer wrongly, half, slowly or not at all, and read what comes.

    Args:
        seed: Of what they do.
        connect: Makes a connection to the listener.
        token: The token, with which they make what somebody could have overheard; they send no right answer.
        frames: What is sent to the listener after the admission.
    """

    def __init__(self, seed: int, connect: Callable[[], socket.socket], token: str, frames: Sequence[bytes]) -> None:
        self._random = random.Random(f"{SEED} {seed}")
        self._connect, self._token, self._frames = connect, token, frames
        self._overheard: list[bytes] = []
        self._open: list[tuple[socket.socket, bytes]] = []
        self.came = 0

    def come(self, count: int, silent: int) -> None:
        """Let so many come one after the other, while `silent` others say nothing; they stay until `leave`."""
        for _ in range(silent):
            self._open.append((self._connect(), b""))
        for _ in range(count):
            channel = self._connect()
            channel.settimeout(LONG_S)
            nonce = _received(channel, _NONCE)
            with contextlib.suppress(ConnectionError):  # it was closed when its answer was seen to be wrong
                self._send(channel, self._answer(nonce))
            self._overheard.append(self._right(nonce))
            if self._random.random() < 0.2:
                _reset(channel)
            else:
                self._open.append((channel, nonce))
        self.came += count + silent

    def leave(self) -> None:
        """Read until the listener has closed each connection: nobody was given its proof, or anything else."""
        for channel, nonce in self._open:
            channel.settimeout(LONG_S)
            rest = _NONCE - len(nonce)
            assert len(_received(channel, rest + 1)) <= rest, "a stranger was admitted"
            channel.close()
        self._open.clear()

    def _right(self, nonce: bytes) -> bytes:
        mine = self._random.randbytes(_NONCE)
        return mine + _proof(self._token, b"connects", nonce, mine)

    def _answer(self, nonce: bytes) -> bytes:
        """One that is wrong."""
        mine = self._random.randbytes(_NONCE)
        right = mine + _proof(self._token, b"connects", nonce, mine)
        flipped = bytearray(right)
        flipped[self._random.randrange(len(right))] ^= 1 << self._random.randrange(8)
        answers = [
            b"",
            right[:-1],
            right[: self._random.randrange(len(right))],
            bytes(flipped),
            nonce + _proof(self._token, b"listens", nonce, nonce),  # what the listener would say
            mine + _proof(self._token, b"listens", nonce, mine),
            mine + _proof(self._token, b"connects", mine, nonce),
            mine + _proof(new_token(), b"connects", nonce, mine),
            mine + _proof("", b"connects", nonce, mine),
            right[_NONCE:] + right[:_NONCE],
            nonce + nonce,
            bytes(_NONCE + _DIGEST),
            b"\0" + right,
            self._random.choice(self._overheard) if self._overheard else b"x",
            self._random.choice(self._frames) * self._random.choice((1, 100)),
            self._random.choice(self._frames) + right,
            self._random.randbytes(self._random.choice((1, 63, 64, 65, 1024, MOST_BYTES))),
            b"[" * MOST_BYTES,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01" + self._random.randbytes(600),
        ]
        return self._random.choice(answers)[:MOST_BYTES]

    def _send(self, channel: socket.socket, answer: bytes) -> None:
        """At once or in pieces, or with bytes out of band among them."""
        chance = self._random.random()
        if chance < 0.5 or channel.family == socket.AF_UNIX:
            channel.sendall(answer)
        elif chance < 0.6:
            channel.send(answer[:1] or b"x", socket.MSG_OOB)
            channel.sendall(answer[1:-1])
        else:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for place in range(0, min(len(answer), 256)):
                channel.send(answer[place : place + 1])


def _received(channel: socket.socket, size: int) -> bytes:
    """Up to so many bytes; less if the other end closes. TimeoutError if it does nothing."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (part := channel.recv(size - len(data))):
            data += part
    return data


def _reset(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    channel.close()
