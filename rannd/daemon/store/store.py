"""The store: one SQLite file of self-describing entries.

Tables (their version is `FORMAT`, in the file's name and in its ``user_version``)::

    entries     key kind format rannd created used hits components length checksum size value
    set_aside   at key kind reason components head       the last 16 entries that were corrupt or discarded
    misses      miss                                     the last 32 misses that were asked about, as JSON
    statistics  name count

``length`` is that of the value as it is stored, ``size`` that before compression (0: not compressed). ``checksum`` is
BLAKE2b-128 of key, kind, format, components, size and value. Entries of compiled code have a folder beside the store,
which counts like a value and is removed with its entry. An entry whose checksum does not match is a miss: it is
set aside, counted, and replaced by the next write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Generator, Sequence
from typing import Any

import msgspec

from rannd.daemon.common.compression import PackedValue
from rannd.daemon.common.keys import digest_of
from rannd.daemon.common.near_misses import nearest
from rannd.daemon.common.protocol import MAX_BATCH_BYTES, EntryInfo, KindCount, Miss, Nearest, NewEntry, Statistics
from rannd.daemon.store import compiled_folders
from rannd.daemon.store.database import Database
from rannd.daemon.store.entry_rows import COMPILED, FORMAT, INFO, LISTED, WEIGHT, description, fault, new_row
from rannd.errors import DaemonError

KEEP_ASIDE = 16
KEEP_MISSES = 32
NEAR = 512
"""Number of entries, latest used first, among which the one nearest to a miss is searched."""
MAX_UNWRITTEN = 1000
"""Maximum number of last-use times to keep in memory before they are written."""
HEAD_BYTES = 64 << 10
"""Bytes to keep of a value that is set aside."""
PAGE = 64
"""Maximum number of entries in one page of a listing."""
JUMP_S = 1.0
"""Seconds by which the clock must go back to count as set back, not adjusted."""
DATED_S = 60.0
"""Seconds in the past to which entries are dated if the clock was set back: before any refresh that begins now."""
VERIFY_PAGE = 8
"""Number of entries to check at once; few, so that other requests are answered in between."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, format INTEGER NOT NULL, rannd TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, hits INTEGER NOT NULL, components TEXT NOT NULL,
    length INTEGER NOT NULL, checksum TEXT NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON entries (used, length);
CREATE INDEX IF NOT EXISTS by_kind ON entries (kind, used);
CREATE TABLE IF NOT EXISTS misses (miss TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS set_aside (
    at REAL NOT NULL, key TEXT, kind TEXT, reason TEXT NOT NULL, components TEXT, head BLOB
);
CREATE TABLE IF NOT EXISTS statistics (name TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""


class Store:
    """Entries in a file. Used by one thread of one process."""

    def __init__(self, path: str, *, max_bytes: int, busy_s: float = 2.0) -> None:
        """Open or create the store.

        Args:
            path: The SQLite file, in an existing directory.
            max_bytes: Sum of the values' lengths above which the least recently used entries are evicted.
            busy_s: Maximum seconds to wait for a previous daemon that is still closing the file.

        Raises:
            DaemonError: Another process holds the store, or it cannot be written.
        """
        self.path = path
        self.max_bytes = max_bytes
        self._log = logging.getLogger("rannd.Daemon")
        self._used: dict[str, tuple[float, int]] = {}
        self._counted: dict[str, int] = {}
        self._closed = False
        self._offset = time.time() - time.monotonic()
        """Offset of the clock, which changes if the clock is set back."""
        self._db = Database(path, schema=_SCHEMA, number=FORMAT, busy_s=busy_s, begun_anew=self._lost)
        self._compiled = os.path.join(os.path.dirname(path), "compiled")
        with self._db.errors("opened"):
            self._date_again(time.time())
            self._sweep()

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, kind: str, *, peek: bool = False) -> PackedValue | None:
        """Return the value of `key`; None, and a miss of `kind` is counted, if there is no sound one.

        `peek`: do not count this as a use, hit or miss.
        """
        with self._db.errors("read"), self._db.healing():
            row = self._db.sql.execute(f"SELECT {INFO}, value FROM entries WHERE key = ?", (key,)).fetchone()
            if row is not None and (reason := fault(row)) is not None:
                self._set_aside(key, reason)
                self.count("corrupt")
                row = None
            value = PackedValue(bytes(row[-1]), row[-2]) if row is not None else None
            if peek:
                return value
            if value is None:
                self.missed(kind)
                return None
            self.count("hits")
            self.count(f"hits/{row[1]}")
            self._used[key] = (self._now(), self._used.get(key, (0.0, 0))[1] + 1)
            if len(self._used) >= MAX_UNWRITTEN:
                self.flush()
            return value
        return None

    def stored_since(self, key: str, moment: float) -> bool:
        """Whether `key` has a value stored at or after `moment` (seconds since the epoch)."""
        with self._db.errors("read"), self._db.healing():
            self._now()
            found = self._db.sql.execute("SELECT 1 FROM entries WHERE key = ? AND created >= ?", (key, moment))
            return found.fetchone() is not None
        return False

    def page(self, *, after: str = "", prefix: str | None = None) -> tuple[list[EntryInfo], bool]:
        """Return up to PAGE entries whose key follows `after`, and whether others follow them."""
        self.flush()
        with self._db.errors("read"), self._db.healing():
            rows, more = _first(
                self._db.sql.execute(
                    f"SELECT {LISTED} FROM entries WHERE key > ? AND key LIKE ? || '%' ORDER BY key",
                    (after, prefix or ""),
                )
            )
            return self._infos(rows), more
        return [], False

    def size(self) -> tuple[int, int]:
        """Return the number of entries and the bytes of all values."""
        with self._db.errors("read"), self._db.healing():
            number, length = self._db.sql.execute(f"SELECT count(*), total{WEIGHT} FROM entries").fetchone()
            return int(number), int(length)
        return 0, 0

    def verify(self, after: str = "") -> tuple[int, list[str], str | None]:
        """Check up to VERIFY_PAGE entries after `after`: number of sound ones, keys set aside, next `after`."""
        with self._db.errors("read"), self._db.healing():
            rows = self._db.sql.execute(
                f"SELECT {INFO}, value FROM entries WHERE key > ? ORDER BY key LIMIT ?", (after, VERIFY_PAGE)
            ).fetchall()
            corrupt: list[str] = []
            for row in rows:
                if (reason := fault(row)) is not None:
                    corrupt.append(str(row[0]))
                    self._set_aside(row[0], reason)
                    self.count("corrupt")
            return len(rows) - len(corrupt), corrupt, str(rows[-1][0]) if len(rows) == VERIFY_PAGE else None
        return 0, [], None

    def statistics(self) -> Statistics:
        """Return all counters since the store was created."""
        self.flush()
        with self._db.errors("read"), self._db.healing():
            rows = dict(self._db.sql.execute("SELECT name, count FROM statistics").fetchall())
            return Statistics(**{name: int(rows.get(name, 0)) for name in Statistics.__struct_fields__})
        return Statistics()

    def kinds(self) -> dict[str, KindCount]:
        """Return hits and misses of each kind since the store was created."""
        self.flush()
        found: dict[str, dict[str, int]] = {}
        with self._db.errors("read"), self._db.healing():
            rows = self._db.sql.execute(
                "SELECT name, count FROM statistics WHERE name LIKE '%/%' ORDER BY name"
            ).fetchall()
            for name, count in rows:
                what, _, kind = name.partition("/")
                found.setdefault(kind, {})[what] = int(count)
        return {kind: KindCount(counts.get("hits", 0), counts.get("misses", 0)) for kind, counts in found.items()}

    def misses(self) -> list[Miss]:
        """Return the latest misses that were asked about, last one first."""
        with self._db.errors("read"), self._db.healing():
            rows = self._db.sql.execute("SELECT miss FROM misses ORDER BY rowid DESC").fetchall()
            return [msgspec.json.decode(text, type=Miss) for (text,) in rows]
        return []

    # -- writing -------------------------------------------------------------------------------------------------

    def put(self, entries: Sequence[NewEntry], rannd: str, *, keep: Collection[str] = ()) -> None:
        """Store `entries`, written by version `rannd`; evict others, except `keep`, down to the size limit.

        On return the entries survive the death of this process.

        Raises:
            DaemonError: A key does not belong to its components, a value is above the size limit, or the disk is full.
        """
        for entry in entries:
            if entry.key != digest_of(entry.kind, entry.components):
                raise DaemonError(f"key {entry.key[:12]} does not match its components; it is not stored")
            if len(entry.value) > self.max_bytes:
                raise DaemonError(
                    f"a value of {len(entry.value)} bytes is above the cache's limit of {self.max_bytes}; "
                    "raise cache_max_gb to keep it"
                )
        now = self._now()
        rows = [new_row(entry, rannd, now) for entry in entries]
        self.flush()
        with self._db.errors("written"), self._db.healing():
            with self._db.transaction():
                self._db.sql.executemany(
                    f"INSERT OR REPLACE INTO entries ({INFO}, value) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", rows
                )
                self.count("stored", len(rows))
                evicted = self._evict({entry.key for entry in entries}.union(keep))
            if evicted:
                self._db.shrink()
            return
        raise DaemonError(f"the store {self.path} was corrupt and has been created again; this value is not stored")

    def nearest(self, kind: str, components: dict[str, str], pid: int = 0, *, remember: bool = True) -> Nearest:
        """Return the entry of `kind` nearest to these components, which process `pid` (0: unknown) has missed.

        `remember`: keep the miss for `misses`.
        """
        key = digest_of(kind, components)
        with self._db.errors("written"), self._db.healing():
            rows, _ = _first(
                self._db.sql.execute(
                    f"SELECT {INFO} FROM entries WHERE kind = ? AND key != ? ORDER BY used DESC", (kind, key)
                ),
                NEAR,
            )
            entry, found = nearest(components, self._infos(rows))
            if not remember:
                return Nearest(entry, found)
            miss = Miss(time.time(), kind, key, components, entry.key if entry is not None else "", found, pid)
            with self._db.transaction():
                self._db.sql.execute("INSERT INTO misses VALUES (?)", (msgspec.json.encode(miss).decode(),))
                self._db.sql.execute(
                    "DELETE FROM misses WHERE rowid NOT IN (SELECT rowid FROM misses ORDER BY rowid DESC LIMIT ?)",
                    (KEEP_MISSES,),
                )
            return Nearest(entry, found)
        return Nearest(None, [])

    def prune(self, max_bytes: int, *, keep: Collection[str] = ()) -> tuple[list[EntryInfo], bool]:
        """Remove least recently used entries, except `keep`, until values take at most `max_bytes`.

        Returns up to PAGE removed entries, and whether to call again.
        """
        self.flush()
        with self._db.errors("written"), self._db.healing():
            total = int(self._db.sql.execute(f"SELECT total{WEIGHT} FROM entries").fetchone()[0])

            def excess() -> Generator[Any, None, None]:
                left = total
                for row in self._db.sql.execute(f"SELECT {LISTED} FROM entries ORDER BY used, key"):
                    if left <= max_bytes:
                        break
                    if row[0] not in keep:
                        left -= row[7]
                        yield row

            rows, more = _first(excess())
            with self._db.transaction():
                self._db.sql.executemany("DELETE FROM entries WHERE key = ?", [(row[0],) for row in rows])
            self._remove_folders(rows)
            self._db.shrink()
            self.count("removed", len(rows))
            return [found for row in rows if (found := description(row)) is not None], more
        return [], False

    def zero(self) -> None:
        """Reset the statistics."""
        self.flush()
        with self._db.errors("written"), self._db.healing():
            self._db.sql.execute("DELETE FROM statistics")

    def missed(self, kind: str) -> None:
        """Count a look-up that found nothing."""
        self.count("misses")
        self.count(f"misses/{kind}")

    def discard(self, key: str, reason: str) -> bool:
        """Set the entry `key` aside because it turned out to be wrong; return whether there was one."""
        with self._db.errors("written"), self._db.healing():
            found = self._set_aside(key, reason)
            self.count("discarded", int(found))
            return found
        return False

    def clear(
        self, *, kind: str | None = None, older_than_s: float | None = None, keys: Collection[str] | None = None
    ) -> tuple[list[EntryInfo], bool]:
        """Remove up to PAGE entries that match all given conditions; return them, and whether there are more.

        Args:
            kind: Entries of this kind.
            older_than_s: Entries not used for so many seconds.
            keys: Entries whose key starts with one of these.
        """
        self.flush()
        wanted, values = ["1"], list[object]()
        if kind is not None:
            wanted.append("kind = ?")
            values.append(kind)
        if older_than_s is not None:
            wanted.append("used <= ?")
            values.append(self._now() - older_than_s)
        if keys is not None:
            wanted.append("(0" + " OR key LIKE ? || '%'" * len(keys) + ")")
            values += keys
        with self._db.errors("written"), self._db.healing():
            where = " AND ".join(wanted)
            found, more = _first(
                self._db.sql.execute(f"SELECT {LISTED} FROM entries WHERE {where} ORDER BY key", values)
            )
            with self._db.transaction():
                self._db.sql.executemany("DELETE FROM entries WHERE key = ?", [(row[0],) for row in found])
            self._remove_folders(found)
            self._db.shrink()
            self.count("removed", len(found))
            return [info for row in found if (info := description(row)) is not None], more
        return [], False

    def count(self, name: str, by: int = 1) -> None:
        """Add to a statistic; written with the next flush."""
        if by:
            self._counted[name] = self._counted.get(name, 0) + by

    def flush(self) -> None:
        """Write last-use times and statistics. If they cannot be written they are lost, with a line in the log."""
        if not (self._used or self._counted):
            return
        try:
            with self._db.healing(), self._db.transaction():
                self._write_counts()
        except (sqlite3.Error, OSError, DaemonError) as exc:
            self._log.warning("last-use times and statistics are not written: %s", exc)
        self._used.clear()
        self._counted.clear()

    def close(self) -> None:
        """Flush and close."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._db.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """Reset what is in memory after the file was corrupt."""
        self._used.clear()
        self.count("corrupt")

    def _now(self) -> float:
        """Return seconds since the epoch. If the clock has been set back, entries are dated again before that."""
        now = time.time()
        offset = now - time.monotonic()
        back, self._offset = self._offset - offset, offset
        if back > JUMP_S:
            self._date_again(now)
        return now

    def _date_again(self, now: float) -> None:
        """Re-date entries with a use in the future: they would stay the latest used ones for ever, and never age."""
        self.flush()  # what waits to be written has such times, too
        late: list[Any] = []
        try:
            with self._db.healing(), self._db.transaction():
                late = self._db.sql.execute(
                    "SELECT key FROM entries WHERE used > ? ORDER BY used, key", (now,)
                ).fetchall()
                first = now - DATED_S - len(late) * 1e-6  # one microsecond each keeps their order
                self._db.sql.executemany(
                    "UPDATE entries SET used = ?, created = min(created, ?) WHERE key = ?",
                    [(first + place * 1e-6, first, key) for place, (key,) in enumerate(late)],
                )
        except (sqlite3.Error, OSError, DaemonError) as exc:
            self._log.warning("entries last used in the future cannot be re-dated: %s", exc)
            return
        if late:
            self._log.info("the clock was set back: %d entries last used in the future are re-dated", len(late))

    def _infos(self, rows: Sequence[Sequence[Any]]) -> list[EntryInfo]:
        found = []
        for row in rows:
            info = description(row)
            if info is None:
                self._set_aside(row[0], "its description is unreadable")
                self.count("corrupt")
            else:
                found.append(info)
        return found

    def _set_aside(self, key: object, reason: str) -> bool:
        with self._db.transaction():
            moved = self._db.sql.execute(
                "INSERT INTO set_aside SELECT ?, key, kind, ?, components, substr(value, 1, ?) "
                "FROM entries WHERE key = ?",
                (time.time(), reason, HEAD_BYTES, key),
            ).rowcount
            self._db.sql.execute("DELETE FROM entries WHERE key = ?", (key,))
            compiled_folders.remove(self._compiled, [key])
            self._db.sql.execute(
                "DELETE FROM set_aside WHERE rowid NOT IN (SELECT rowid FROM set_aside ORDER BY rowid DESC LIMIT ?)",
                (KEEP_ASIDE,),
            )
        if moved:
            self._log.warning("entry %.12s is set aside: %s", key, reason)
        return bool(moved)

    def _evict(self, keep: Collection[str]) -> int:
        """Remove least recently used entries down to the size limit; return how many."""
        total = int(self._db.sql.execute(f"SELECT total{WEIGHT} FROM entries").fetchone()[0])
        if total <= self.max_bytes:
            return 0
        evicted = []
        for row in self._db.sql.execute(f"SELECT key, kind, {WEIGHT} FROM entries ORDER BY used, key").fetchall():
            if total <= self.max_bytes:
                break
            if row[0] not in keep:
                self._db.sql.execute("DELETE FROM entries WHERE key = ?", (row[0],))
                total -= row[2]
                evicted.append(row)
        self.count("evicted", len(evicted))
        self._remove_folders(evicted)
        return len(evicted)

    def _remove_folders(self, rows: Sequence[Sequence[Any]]) -> None:
        """Remove the folders of removed entries of compiled code, given rows that begin with key and kind."""
        compiled_folders.remove(self._compiled, [row[0] for row in rows if row[1] == COMPILED])

    def _sweep(self) -> None:
        """Remove folders of compiled code that no entry stands for."""
        with self._db.healing():
            rows = self._db.sql.execute("SELECT key FROM entries WHERE kind = ?", (COMPILED,)).fetchall()
            gone = compiled_folders.sweep(self._compiled, {key for (key,) in rows})
            if gone:
                self._log.info("removed %d folders of compiled code that no entry stands for", gone)

    def _write_counts(self) -> None:
        self._db.sql.executemany(
            "UPDATE entries SET used = max(used, ?), hits = hits + ? WHERE key = ?",
            [(used, hits, key) for key, (used, hits) in self._used.items()],
        )
        self._db.sql.executemany(
            "INSERT INTO statistics VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET count = count + excluded.count",
            list(self._counted.items()),
        )


def _first(rows: sqlite3.Cursor | Generator[Any, None, None], most: int = PAGE) -> tuple[list[Any], bool]:
    """Return the rows (INFO) that fit into a message, at most `most`, and whether others follow."""
    found: list[Any] = []
    size = 0
    with contextlib.closing(rows):
        for row in rows:
            size += len(str(row[9]))  # a corrupt row may contain anything
            if len(found) == most or (found and size > MAX_BATCH_BYTES):
                return found, True
            found.append(row)
    return found, False
