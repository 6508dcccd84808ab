"""Frames that the watcher of a rank and the monitor exchange.

They are exchanged once both have proved that they are of the same job (line_channel.py). A frame is one byte of kind,
four bytes of length (big endian) and the payload. All but rank output is JSON. Standard library only: the watcher runs
without site-packages.

==========  ==================  ========================================================
kind        direction           payload
==========  ==================  ========================================================
``HELLO``   watcher -> monitor  ``{"rank", "host", "pid"}``; the first frame
``STDOUT``  watcher -> monitor  bytes the rank wrote to its standard output
``STDERR``  watcher -> monitor  bytes the rank wrote to its standard error
``NOTE``    watcher -> monitor  a JSON object that the rank wrote to its notes (rannd/ranks/rank_notes.py)
``EXIT``    watcher -> monitor  ``{"status", "time", "tail", "ordered", "leftovers"}``
``DONE``    watcher -> monitor  ``{"held"}``: no process of the rank is left, all output was sent, and which parts of
                                steps are in memory (kept_memory.py)
``WROTE``   watcher -> monitor  ``{"error"}``: the answer to RESCUE, '' if the part is written
``NOTICE``  watcher -> monitor  ``{"host", "seconds"}``: a host is going away (notice_socket.py)
``SIGNAL``  monitor -> watcher  ``{"signal"}``: forward it to the rank
``STOP``    monitor -> watcher  ``{"signal"}``: forward it, SIGKILL after the grace period
``KILL``    monitor -> watcher  empty: SIGKILL now
``RESCUE``  monitor -> watcher  ``{"number", "rank", "folder"}``: write this rank's part of a kept step
``QUIT``    monitor -> watcher  empty: the job is over, exit
``NOTICED`` monitor -> watcher  ``{"taken", "text"}``: the answer to the first NOTICE without one
==========  ==================  ========================================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HELLO = b"H"
STDOUT = b"O"
STDERR = b"E"
NOTE = b"N"
EXIT = b"X"
DONE = b"D"
NOTICE = b"P"
SIGNAL = b"S"
STOP = b"T"
KILL = b"K"
QUIT = b"Q"
RESCUE = b"R"
WROTE = b"W"
NOTICED = b"A"
KINDS = frozenset((HELLO, STDOUT, STDERR, NOTE, EXIT, DONE, NOTICE, WROTE, SIGNAL, STOP, KILL, RESCUE, QUIT, NOTICED))

#: Maximum payload in bytes.
MAX_PAYLOAD = 1 << 20

_HEADER = struct.Struct(">cI")


class WireError(Exception):
    """The received bytes are not frames."""


def encode(kind: bytes, payload: bytes = b"") -> bytes:
    """Encode one frame. `payload` has at most MAX_PAYLOAD bytes."""
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    return _HEADER.pack(kind, len(payload)) + payload


def encode_json(kind: bytes, **fields: Any) -> bytes:
    """Encode one frame with `fields` as a JSON object."""
    return encode(kind, json.dumps(fields).encode())


def decode_json(payload: bytes) -> dict[str, Any]:
    """Decode the JSON object of a payload.

    Raises:
        WireError: It is not a JSON object.
    """
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of too many digits; a nesting that is too deep
        raise WireError(f"the payload is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise WireError(f"the payload is a {type(fields).__name__}, not an object")
    return fields


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take more bytes and yield each complete frame as (kind, payload).

        Raises:
            WireError: An unknown kind, or a length over MAX_PAYLOAD.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if kind not in KINDS:
                raise WireError(f"unknown kind of frame: {kind!r}")
            if length > MAX_PAYLOAD:
                raise WireError(f"a payload of {length} bytes is over the limit of {MAX_PAYLOAD}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, payload
