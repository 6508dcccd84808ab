"""Requests to the daemon that raise on errors. Starts the daemon if needed, and repeats requests if it disappears."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rannd.daemon.client import request_channel, spawn
from rannd.daemon.common import file_locks, protocol
from rannd.daemon.common.compression import PackedValue
from rannd.daemon.common.paths import DaemonPaths
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError

R = TypeVar("R", bound=protocol.Reply)

MOST_LINES = 2
"""Number of idle connections that a session keeps: one for the job, one for the thread that sends beats."""


class RefusedError(DaemonError):
    """The daemon works, but refused the request. `code` as in `protocol.Failed`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class DaemonSession:
    """Session with the daemon of `places`. Threads may share it."""

    def __init__(self, places: DaemonPaths, settings: Settings, timeout_s: float) -> None:
        """`timeout_s`: maximum seconds per request, including a start of the daemon."""
        self.places = places
        self.settings = settings
        self.timeout_s = timeout_s
        self._lines: list[request_channel.Line] = []
        """Idle connections."""
        self._finalizer = weakref.finalize(self, _hang_up, self._lines)

    def close(self) -> None:
        """Close the connections. The session can still be used."""
        _hang_up(self._lines)

    def greet(self) -> spawn.Daemon:
        """Start the daemon if it does not run, and replace an older one.

        Raises:
            DaemonError: The daemon cannot be started or does not answer.
        """
        deadline = time.monotonic() + self.timeout_s
        self.places.secure_runtime()
        with file_locks.held(self.places.use, deadline, shared=True):
            return spawn.greet(self.places, self.settings, deadline)

    def ask(self, request: protocol.Request, *expected: type[R], wait_s: float = 0.0) -> R:
        """Send `request` and return the reply, one of the types `expected`.

        Args:
            request: The request.
            expected: Types that the reply may have.
            wait_s: Seconds that the daemon may delay its reply, in addition to the session's timeout.

        Raises:
            RefusedError: The daemon refused the request, with the reason.
            DaemonError: There is no daemon, or no reply in time.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        replaced = False
        # Sharing `use` from before looking at the socket until the reply prevents an idle exit.
        with file_locks.held(self.places.use, deadline, shared=True):
            while True:
                line = self._line(deadline)
                try:
                    reply = line.ask(request, deadline)
                except request_channel.GoneError:
                    line.close()
                    if time.monotonic() >= deadline:
                        raise DaemonError(
                            f"the daemon starts but exits at once; its log is {self.places.log}"
                        ) from None
                except protocol.VersionError as exc:
                    line.close()
                    if exc.version > protocol.PROTOCOL or replaced:
                        raise
                    # Another environment has started an older daemon since the greeting.
                    spawn.greet(self.places, self.settings, deadline)
                    replaced = True
                except BaseException:
                    line.close()
                    raise
                else:
                    self._keep(line)
                    break
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, protocol.Failed):
            raise RefusedError(reply.code, reply.text)
        raise DaemonError(f"the daemon answers {type(reply).__name__} to {type(request).__name__}; `rannd restart`")

    def _line(self, deadline: float) -> request_channel.Line:
        """Return a connection to the daemon; start it if it does not run. The caller holds `use` shared."""
        while True:
            try:
                line = self._lines.pop()  # atomic: other threads pop, too
            except IndexError:
                break
            if line.up:
                return line
            line.close()
        spawn.start_if_down(self.places, self.settings, deadline)
        return request_channel.Line(self.places.socket)

    def _keep(self, line: request_channel.Line) -> None:
        if len(self._lines) < MOST_LINES:
            self._lines.append(line)
        else:
            line.close()

    # -- what the commands need ----------------------------------------------------------------------------------

    def state(self) -> protocol.State:
        """Return the state of the daemon."""
        return self.ask(protocol.Status(), protocol.State)

    def entries(self, prefix: str | None = None) -> Iterator[protocol.EntryInfo]:
        """Yield all entries, or those whose key starts with `prefix`, by key."""
        after = ""
        while True:
            page = self.ask(protocol.List(after, prefix), protocol.Entries)
            yield from page.entries
            if not page.more:
                return
            if page.entries:  # otherwise all of the page were unreadable and have been set aside
                after = page.entries[-1].key

    def clear(
        self, *, kind: str | None = None, older_than_s: float | None = None, keys: list[str] | None = None
    ) -> list[protocol.EntryInfo]:
        """Remove the entries that match all given conditions (`keys`: prefixes of keys); return the removed ones."""
        removed: list[protocol.EntryInfo] = []
        while True:
            page = self.ask(protocol.Clear(kind, older_than_s, keys), protocol.Entries)
            removed += page.entries
            if not page.more:
                return removed

    def verify(self) -> tuple[int, list[str]]:
        """Check every entry; return the number of sound ones, and the keys of those set aside."""
        sound, corrupt, after = 0, list[str](), ""
        while True:
            page = self.ask(protocol.Verify(after), protocol.Verified)
            sound += page.sound
            corrupt += page.corrupt
            if page.next is None:
                return sound, corrupt
            after = page.next

    def prune(self, max_bytes: int) -> list[protocol.EntryInfo]:
        """Remove least recently used entries, except leased ones, down to `max_bytes` of values; return them."""
        removed: list[protocol.EntryInfo] = []
        while True:
            page = self.ask(protocol.Prune(max_bytes), protocol.Entries)
            removed += page.entries
            if not page.more:
                return removed

    def misses(self) -> list[protocol.Miss]:
        """Return the latest misses that were asked about, last one first."""
        return self.ask(protocol.Misses(), protocol.Missed).misses

    def zero(self) -> None:
        """Reset the statistics."""
        self.ask(protocol.Zero(), protocol.Done)

    def values(self, entries: Sequence[protocol.EntryInfo]) -> Iterator[PackedValue | None]:
        """Yield the stored value of each entry, None if it no longer exists. Does not count as a use.

        Only one message is in memory at a time: MAX_BATCH_BYTES, or one larger value.
        """
        done = 0
        while done < len(entries):
            part = entries[done : done + protocol.MAX_BATCH]
            keys, kinds = [each.key for each in part], [each.kind for each in part]
            reply = self.ask(protocol.Get(keys, kinds, peek=True), protocol.Values)
            if not reply.values:
                raise DaemonError(f"the daemon answers nothing for {len(part)} keys; `rannd restart`")
            sizes = reply.sizes or [0] * len(reply.values)
            for data, size in zip(reply.values[: len(part)], sizes, strict=False):
                yield None if data is None else PackedValue(data, size)
                done += 1

    def put(self, entries: list[protocol.NewEntry], version: str) -> None:
        """Store at most MAX_BATCH entries, as written by `version` of rannd. On return they survive a kill."""
        self.ask(protocol.Put(version, entries), protocol.Done)


def _hang_up(lines: list[request_channel.Line]) -> None:
    while lines:
        lines.pop().close()
