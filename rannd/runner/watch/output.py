"""Output to the terminal: whole lines, each with the rank that wrote it; standard error stays separate."""

from __future__ import annotations

import os
import re
from collections import deque

#: Bytes at which a line is broken; a rank that never ends a line must not fill the memory.
MAX_LINE = 4 << 20

#: A line ends with a newline, or with a carriage return (progress bars).
_LINE_END = re.compile(rb"\r\n|\n|\r")
#: A line of the runtime's log, in its default pattern.
_LOG_LINE = re.compile(rb"\[\w+\] \[(trace|debug|info|warning|error|critical)\] ")
#: A pipe that polls as writable takes this many bytes without blocking (PIPE_BUF).
_ATOMIC = 4096


class LineTagger:
    """Prefixes each line of a stream that arrives in arbitrary chunks.

    With an empty prefix everything is passed on at once, so that prompts and progress bars show.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._partial = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes, with their prefix."""
        if not self._prefix:
            return data
        if self._partial and not self._partial.endswith(b"\r") and _LOG_LINE.match(data):
            self._partial += b"\n"  # a progress bar waits there for its next state
        self._partial += data
        lines = []
        start = 0
        for end in _LINE_END.finditer(self._partial):
            if end.group() == b"\r" and end.end() == len(self._partial) and len(self._partial) < MAX_LINE:
                break  # the newline that belongs to it may be in the next chunk
            if end.group() != b"\r" or end.start() > start:  # a bar begins with one
                lines.append(self._prefix + self._partial[start : end.end()])
            start = end.end()
        del self._partial[:start]
        if len(self._partial) >= MAX_LINE:
            lines.append(self.flush())
        return b"".join(lines)

    def flush(self) -> bytes:
        """Return the rest: a last line without its end, completed with a newline."""
        if not self._partial:
            return b""
        line = self._prefix + bytes(self._partial)
        self._partial.clear()
        if line == self._prefix + b"\r":
            return b""
        return line if line.endswith((b"\n", b"\r")) else line + b"\n"


class OutputQueue:
    """A queue of writes to file descriptors that never blocks for long and never interleaves two writes.

    One queue for standard output and standard error, because both may be the same pipe.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, memoryview]] = deque()
        self.pending = 0
        """Bytes in the queue."""
        self.broken: set[int] = set()
        """Descriptors whose reader is gone; writes to them are dropped."""

    def write(self, fd: int, data: bytes) -> None:
        """Queue `data` for `fd`."""
        if data and fd not in self.broken:
            self._queue.append((fd, memoryview(data)))
            self.pending += len(data)

    @property
    def waiting_for(self) -> int | None:
        """The descriptor that has to become writable next, None if the queue is empty."""
        return self._queue[0][0] if self._queue else None

    def pump(self) -> None:
        """Write one chunk; call it when `waiting_for` polls as writable."""
        fd, data = self._queue.popleft()
        piece = data[:_ATOMIC]
        if fd in self.broken:
            self.pending -= len(data)
            return
        try:
            written = os.write(fd, piece)
        except BlockingIOError:  # another program left the terminal non-blocking
            written = 0
        except OSError:
            self.broken.add(fd)
            self.pending -= len(data)
            return
        self.pending -= written
        if written < len(data):
            self._queue.appendleft((fd, data[written:]))

    def drop(self) -> None:
        """Clear the queue."""
        self._queue.clear()
        self.pending = 0
