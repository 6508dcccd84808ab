"""The hub of the side channel in a thread of its own, as rank 0's watcher thread runs it."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import threading
from collections.abc import Iterator

from rannd.ranks.admission import new_token
from rannd.runtime.failure.coordinator import Hub
from rannd.runtime.failure.side_channel import AnyMessage, Channel, listen

LONG_S = 60.0
"""Far above what an answer takes on a busy machine."""


class HubThread:
    """A hub for `size` ranks; `rank_0` is the connection of its own process.

    Args:
        size: Number of ranks.
        around: Entered in the thread.
    """

    def __init__(self, size: int, around: contextlib.AbstractContextManager[object] | None = None) -> None:
        listener = listen(alone=True)
        self.token = new_token()
        self.port: int = listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._hub = Hub(size, self.token, listener, self._selector)
        mine, its = socket.socketpair()
        self._hub.adopt(Channel(its))
        self._stop, stopped = socket.socketpair()
        self._ends = [mine, stopped]
        self._selector.register(stopped, selectors.EVENT_READ, self._end)
        self.rank_0 = Channel(mine)
        self._ending = False
        self._around = around if around is not None else contextlib.nullcontext()
        self.error: BaseException | None = None
        """What has ended the thread."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _end(self) -> None:
        self._ending = True

    def _run(self) -> None:
        try:
            with self._around:
                while not self._ending:
                    for key, _ in self._selector.select(self._hub.due()):
                        key.data()
                    self._hub.tick()
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        """End the thread and all connections."""
        self._stop.sendall(b"x")
        self._thread.join()
        self._hub.forget()
        self._selector.close()
        for each in (self._stop, *self._ends):
            each.close()


def heard(channel: Channel) -> Iterator[AnyMessage]:
    """The messages that come over a connection, until it ends. TimeoutError if nothing comes."""
    while True:
        if not select.select([channel.socket], [], [], LONG_S)[0]:
            raise TimeoutError("nothing came")
        messages = channel.receive()
        if messages is None:
            return
        yield from messages


def frame(data: bytes) -> bytes:
    """What is sent for a message."""
    return struct.pack(">I", len(data)) + data
