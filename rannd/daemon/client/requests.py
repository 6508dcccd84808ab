"""Requests to the daemon as calls that raise: starting it when it is not there, asking again when it went away."""

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
"""Connections that a session keeps between requests: for the job, and for the thread that beats for its lease."""


class RefusedError(DaemonError):
    """The daemon is well and refused the request. `code` as in `protocol.Failed`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class DaemonSession:
    """A way to ask the daemon of `places`. Threads may share it."""

    def __init__(self, places: DaemonPaths, settings: Settings, timeout_s: float) -> None:
        """`timeout_s`: how long any request may take, a start of the daemon included."""
        self.places = places
        self.settings = settings
        self.timeout_s = timeout_s
        self._lines: list[request_channel.Line] = []
        """Those that nobody uses now."""
        self._finalizer = weakref.finalize(self, _hang_up, self._lines)

    def close(self) -> None:
        """Hang up. The session can be used again."""
        _hang_up(self._lines)

    def greet(self) -> spawn.Daemon:
        """Start the daemon if need be, replace an older one.

        Raises:
            DaemonError: it cannot be had.
        """
        deadline = time.monotonic() + self.timeout_s
        self.places.secure_runtime()
        with file_locks.held(self.places.use, deadline, shared=True):
            return spawn.greet(self.places, self.settings, deadline)

    def ask(self, request: protocol.Request, *expected: type[R], wait_s: float = 0.0) -> R:
        """The reply to `request`, one of the types `expected`.

        Args:
            request: What to ask.
            expected: Types the reply may have.
            wait_s: How long the daemon may hold its reply back, beyond the session's timeout.

        Raises:
            RefusedError: the daemon says why not.
            DaemonError: there is no daemon, or no answer in time.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        replaced = False
        # Sharing `use` from before the look at the socket until the answer is what keeps an idle exit off.
        with file_locks.held(self.places.use, deadline, shared=True):
            while True:
                line = self._line(deadline)
                try:
                    reply = line.ask(request, deadline)
                except request_channel.GoneError:
                    line.close()
                    if time.monotonic() >= deadline:
                        raise DaemonError(
                            f"the daemon starts but does not stay; its log is {self.places.log}"
                        ) from None
                except protocol.VersionError as exc:
                    line.close()
                    if exc.version > protocol.PROTOCOL or replaced:
                        raise
                    # Another environment has started an older one since the greeting.
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
        """A connection to the daemon, which is started where it does not run. The caller holds `use` shared."""
        while True:
            try:
                line = self._lines.pop()  # at once, other threads do so too
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
        """How the daemon is."""
        return self.ask(protocol.Status(), protocol.State)

    def entries(self, prefix: str | None = None) -> Iterator[protocol.EntryInfo]:
        """All entries, or those whose key starts with `prefix`, by key."""
        after = ""
        while True:
            page = self.ask(protocol.List(after, prefix), protocol.Entries)
            yield from page.entries
            if not page.more:
                return
            if page.entries:  # else none could be described, and all are set aside by now
                after = page.entries[-1].key

    def clear(
        self, *, kind: str | None = None, older_than_s: float | None = None, keys: list[str] | None = None
    ) -> list[protocol.EntryInfo]:
        """Remove the entries that match everything given (`keys`: starts of keys); those removed."""
        removed: list[protocol.EntryInfo] = []
        while True:
            page = self.ask(protocol.Clear(kind, older_than_s, keys), protocol.Entries)
            removed += page.entries
            if not page.more:
                return removed

    def verify(self) -> tuple[int, list[str]]:
        """Check every entry: how many are sound, the keys of those set aside."""
        sound, corrupt, after = 0, list[str](), ""
        while True:
            page = self.ask(protocol.Verify(after), protocol.Verified)
            sound += page.sound
            corrupt += page.corrupt
            if page.next is None:
                return sound, corrupt
            after = page.next

    def prune(self, max_bytes: int) -> list[protocol.EntryInfo]:
        """Remove the least recently used entries, but none that is leased, until values take `max_bytes`; those
        removed."""
        removed: list[protocol.EntryInfo] = []
        while True:
            page = self.ask(protocol.Prune(max_bytes), protocol.Entries)
            removed += page.entries
            if not page.more:
                return removed

    def misses(self) -> list[protocol.Miss]:
        """The latest misses that somebody wondered about, the last one first."""
        return self.ask(protocol.Misses(), protocol.Missed).misses

    def zero(self) -> None:
        """Begin to count hits, misses and all else anew."""
        self.ask(protocol.Zero(), protocol.Done)

    def values(self, entries: Sequence[protocol.EntryInfo]) -> Iterator[PackedValue | None]:
        """The value of each entry as it is kept, None where it is there no more. To look is no use of it.

        Of a large cache only one message is in memory at a time: MAX_BATCH_BYTES, or one value that is larger.
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
        """Keep these, MAX_BATCH at most, as written by `version` of rannd. On return they survive a kill."""
        self.ask(protocol.Put(version, entries), protocol.Done)


def _hang_up(lines: list[request_channel.Line]) -> None:
    while lines:
        lines.pop().close()
