"""The cache API of a job. Problems with the daemon never stop the job.

An error of the daemon causes one warning; from then on every look-up is a miss and nothing is stored.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal, TypeAlias

import zmq

from rannd.daemon.client.requests import DaemonSession, R, RefusedError
from rannd.daemon.common import protocol
from rannd.daemon.common.compression import PackedValue, pack
from rannd.daemon.common.keys import Key
from rannd.daemon.common.near_misses import clause, phrase
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError, ProtocolError

Mode: TypeAlias = Literal["on", "off", "readonly", "refresh"]

SLICE_S = 5.0
"""Maximum seconds that the daemon delays one reply to a waiting client, so that both notice soon if one is gone."""

MOST_SHOWN = 3
"""Maximum number of differences in one line."""

_log = logging.getLogger("rannd.Daemon")


BEAT_S = 10.0
"""Seconds between beats of the holder of a lease. A lease survives two lost beats."""
TELL_S = 1.0
"""Minimum seconds between reports of progress."""


class Lease:
    """The right to compute the value of a key while others wait for it. Ends with `put`, `release` or this process.

    A thread sends beats to the daemon: a holder that hangs does not block others for ever.
    """

    def __init__(self, client: Client, key: Key, token: str) -> None:
        self.key = key
        self._client = client
        self._token = token
        self._held = True
        self._progress = ""
        self._told = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rannd lease", daemon=True)
        self._thread.start()

    def progress(self, text: str) -> None:
        """Report progress to the waiting processes, such as 'profiling, 40 %'."""
        self._progress = text

    def release(self) -> None:
        """Release the lease; no-op if it has ended."""
        if self._held:
            self._held = False
            self._end.set()
            self._thread.join()
            self._client._release(self.key, self._token)

    def _beat(self) -> None:
        due = time.monotonic() + BEAT_S
        while not self._end.wait(TELL_S):
            text = self._progress
            if text != self._told or time.monotonic() >= due:
                if not self._client._beat(self.key, self._token, text):
                    return  # no daemon, or the lease was lost: the value can still be stored
                self._told, due = text, time.monotonic() + BEAT_S

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Client:
    """Looks up and stores values. No method raises because of the daemon."""

    def __init__(self, mode: Mode, session: DaemonSession | None) -> None:
        """Called by `connect`. `session` is None if there is no daemon."""
        self._mode = mode
        self._session = session
        self._warned: set[str] = set()
        self.used: dict[Key, tuple[bytes, bool]] | None = None
        """If set to a dictionary, it receives each value that is found, or stored (then with True)."""

    @property
    def connected(self) -> bool:
        """Whether there is a daemon to ask."""
        return self._session is not None

    def get(self, key: Key) -> bytes | None:
        """Return the value of `key`, None on a miss."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the value of each key, None for each miss, with few messages."""
        found: list[bytes | None] = []
        if self._mode != "refresh":
            while len(found) < len(keys):
                part = keys[len(found) : len(found) + protocol.MAX_BATCH]
                request = protocol.Get([key.digest for key in part], [key.kind for key in part])
                reply = self._ask(request, protocol.Values)
                if reply is None or not reply.values:
                    break
                found += self._plain(reply)[: len(part)]
        for key, value in zip(keys, found, strict=False):
            self._note(key, value)
        return found + [None] * (len(keys) - len(found))

    def put(self, key: Key, value: bytes) -> bool:
        """Store `value` and end the lease of `key`; return whether it was stored durably."""
        return self.put_many([(key, value)]) == 1

    def put_many(self, items: Iterable[tuple[Key, bytes]]) -> int:
        """Store values; return how many were stored durably."""
        if self._mode == "readonly":
            return 0
        kept, batch, size = 0, list[protocol.NewEntry](), 0
        for key, value in items:
            if len(value) > protocol.MAX_VALUE:
                self._warn("size", f"a value of {len(value)} bytes is above {protocol.MAX_VALUE} and is not cached")
                continue
            self._note(key, value, made=True)
            packed = pack(value)
            more = protocol.weight(key.components, packed.data)
            if batch and (size + more > protocol.MAX_BATCH_BYTES or len(batch) == protocol.MAX_BATCH):
                kept += self._put(batch)
                batch, size = [], 0
            batch.append(protocol.NewEntry(key.digest, key.kind, key.components, packed.data, packed.size))
            size += more
        return kept + (self._put(batch) if batch else 0)

    def lease(
        self, key: Key, wait_s: float, on_wait: Callable[[str], None] | None = None, who: str = ""
    ) -> bytes | Lease | None:
        """Return the value of `key`, or a lease to compute it while all others wait.

        Args:
            key: Key of the value.
            wait_s: Maximum seconds to wait for another process that is computing it.
            on_wait: Called with a line for the user when waiting begins, and when the other process makes progress.
            who: Name of this process in such lines, such as 'rank 0 of job 4711'.

        Returns:
            bytes: The value; it was stored already, or while waiting.
            Lease: Compute the value, `put` it, release the lease.
            None: There is no daemon, or `wait_s` has passed: compute the value without a lease.
        """
        if self._mode == "readonly":
            return self.get(key)
        token = secrets.token_hex(16)
        stored_after = time.time() if self._mode == "refresh" else 0.0
        end = time.monotonic() + wait_s
        slice_s = 0.0
        told = ""
        while True:
            request = protocol.Acquire(
                key.digest, token, os.getpid(), slice_s, stored_after, key.kind, who[:200], beats=True
            )
            reply = self._ask(request, protocol.Values, protocol.Granted, protocol.Busy, wait_s=slice_s)
            if isinstance(reply, protocol.Granted):
                return Lease(self, key, token)
            if isinstance(reply, protocol.Values):
                value = (self._plain(reply) or [None])[0]
                self._note(key, value)
                return value
            if not isinstance(reply, protocol.Busy):
                return None  # no daemon
            left = end - time.monotonic()
            if left <= 0:
                return None
            holder = reply.who or f"process {reply.pid}"
            state = f"{holder} {reply.progress}"
            if state != told and on_wait is not None:
                doing = f"is {reply.progress}" if reply.progress else f"is computing {key.kind} {key.short}"
                on_wait(f"{holder} {doing}, for {reply.since_s:.1f} s so far; waiting for it, {left:.0f} s at most")
            told = state
            slice_s = min(SLICE_S, left)

    def discard(self, key: Key, reason: str) -> None:
        """Set the value of `key` aside because it turned out to be wrong."""
        if self.used is not None:
            self.used.pop(key, None)
        if self._mode != "readonly":
            self._ask(protocol.Discard(key.digest, reason[:4096]), protocol.Done)

    def why(self, key: Key) -> tuple[str, str]:
        """Explain why `key` was missed: the change since the nearest entry of the same model, and the whole comparison.

        For example ('batch 128 -> 64', 'the nearest deployment in the cache, ..., differs in global_batch 64, there
        128'). The first is '' if the cache has no entry of the model; both are '' without a daemon.
        """
        if self._mode in ("off", "refresh"):
            return "", ""
        if sum(map(len, key.components.values())) > protocol.MAX_COMPARED:
            return "", "its key is too large to be compared"
        request = protocol.Why(key.kind, key.components, remember=self._mode != "readonly")
        reply = self._ask(request, protocol.Nearest)
        if reply is None:
            return "", ""
        if reply.entry is None:
            return "", f"the cache has no other {key.kind}"
        shown = ", ".join(phrase(each) for each in reply.differences[:MOST_SHOWN])
        more = len(reply.differences) - MOST_SHOWN
        whole = f"the nearest {key.kind} in the cache, {reply.entry.key[:12]}, differs in {shown}" + (
            f", and {more} more (rannc-cache why --last)" if more > 0 else ""
        )
        return clause(reply.differences), whole

    def close(self) -> None:
        """Disconnect from the daemon, which goes on serving others."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _note(self, key: Key, value: bytes | None, *, made: bool = False) -> None:
        if self.used is not None and value is not None:
            self.used[key] = (value, made)

    def _put(self, batch: list[protocol.NewEntry]) -> int:
        done = self._ask(protocol.Put(version(), batch), protocol.Done)
        return done.count if done is not None else 0

    def _beat(self, key: Key, token: str, progress: str) -> bool:
        done = self._ask(protocol.Beat(key.digest, token, progress[:200]), protocol.Done)
        return done is not None and done.count == 1

    def _plain(self, reply: protocol.Values) -> list[bytes | None]:
        """Decompress values; one that cannot be decompressed is a miss."""
        found: list[bytes | None] = []
        sizes = reply.sizes or [0] * len(reply.values)
        for data, size in zip(reply.values, sizes, strict=False):
            try:
                found.append(None if data is None else PackedValue(data, size).plain())
            except ProtocolError as exc:
                self._warn("value", str(exc))
                found.append(None)
        return found

    def _release(self, key: Key, token: str) -> None:
        self._ask(protocol.Release(key.digest, token), protocol.Done)

    def _ask(self, request: protocol.Request, *expected: type[R], wait_s: float = 0.0) -> R | None:
        session = self._session  # another thread may close this client meanwhile
        if session is None:
            return None
        try:
            return session.ask(request, *expected, wait_s=wait_s)
        except RefusedError as exc:
            # The daemon refused this one request: warn once per kind of refusal.
            self._warn(exc.code, str(exc))
        except (DaemonError, OSError, zmq.ZMQError) as exc:
            self.close()
            self._warn("gone", f"{exc}; the job continues without a cache")
        return None

    def _warn(self, code: str, text: str) -> None:
        if code not in self._warned:
            self._warned.add(code)
            _log.warning("%s", text)


def connect(*, mode: Mode, timeout_s: float, idle_s: float, max_bytes: int) -> Client:
    """Connect to this user's daemon on this node, and start it if it does not run. Never raises because of it.

    Args:
        mode: ``on``; ``off``: never connect; ``readonly``: no stores and no leases; ``refresh``: every look-up misses,
            and new values are stored.
        timeout_s: Maximum seconds per request, including a start of the daemon.
        idle_s: The daemon exits after so many seconds without a request; 0: never.
        max_bytes: Maximum bytes of values that the daemon stores.
    """
    if mode == "off":
        return Client(mode, None)
    try:
        session = DaemonSession(places(), Settings(idle_s, max_bytes, version()), timeout_s)
        session.greet()
    except (DaemonError, OSError, zmq.ZMQError) as exc:
        _log.warning("no daemon: %s; the job continues without a cache", exc)
        return Client(mode, None)
    return Client(mode, session)
