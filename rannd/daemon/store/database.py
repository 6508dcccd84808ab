"""A SQLite file that is there whatever happens to it: opened, healed where it is corrupt, begun anew where it is lost.

On local filesystems the file is in WAL mode with synchronous=NORMAL: a committed write survives the death of the
process. On network filesystems there is no WAL (its shared memory does not work there) and synchronous=FULL.
The locking mode is EXCLUSIVE: whoever else opens the file, as a daemon in another container that shares the home
directory would, is told so. A file that SQLite itself cannot read is renamed to ``*.corrupt`` and a new one begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator

from rannd.daemon.store.filesystem import identity, on_network
from rannd.errors import DaemonError

PLAUSIBLE = 16
"""Newer formats that there may be; what claims more is corrupt."""

_UNREADABLE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Database:
    """The file. Used by one thread of one process."""

    def __init__(self, path: str, *, schema: str, number: int, busy_s: float, begun_anew: Callable[[], None]) -> None:
        """Open or make the file.

        Args:
            path: Its directory exists.
            schema: SQL statements that make the tables where there are none.
            number: Version of the schema, kept in ``user_version``.
            busy_s: How long to wait for a predecessor that is still closing the file.
            begun_anew: Called where the file was corrupt and a new one begins.

        Raises:
            DaemonError: another process holds it, it cannot be written, or a newer rannd wrote it.
        """
        self.path = path
        self._schema, self._format, self._busy_s, self._begun_anew = schema, number, busy_s, begun_anew
        self._log = logging.getLogger("rannd.Daemon")
        self._db: sqlite3.Connection | None = None
        """None: closed, or not opened again yet after it was lost."""
        self._file: tuple[int, int] | None = None
        self._closed = False
        with self.errors("opened"), self.healing():
            self._open()

    @property
    def sql(self) -> sqlite3.Connection:
        """The open file. Where somebody has deleted or moved it, a new one: what is written must be found again."""
        if self._closed:
            raise DaemonError(f"the store {self.path} is closed")
        if self._db is not None:
            if self._db.in_transaction or identity(self.path) == self._file:
                return self._db
            self._log.warning("the store %s was taken away: a new one begins", self.path)
            self._db.close()
            self._db = None
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        return self._open()

    def _open(self) -> sqlite3.Connection:
        # The descriptor makes the file with its mode before SQLite would with the process's umask.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._file = identity(self.path)
        self._db = db = sqlite3.connect(self.path, timeout=self._busy_s, isolation_level=None)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            self._db = None  # half of a store is none: the next request tries again
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        # A flipped byte may break UTF-8: such a text must fail its checksum, not the query.
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        written = int(db.execute("PRAGMA user_version").fetchone()[0])
        if not 0 <= written <= self._format + PLAUSIBLE:
            raise _NotOurs(f"its format is {written}")
        if written > self._format:  # before anything is changed: it is another version's
            raise DaemonError(
                f"the store {self.path} is of format {written}, which a newer rannd wrote; this one reads "
                f"{self._format}: update it, or set XDG_CACHE_HOME to a directory of its own"
            )
        network = on_network(self.path)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute(f"PRAGMA journal_mode = {'DELETE' if network else 'WAL'}").fetchone()
        db.execute(f"PRAGMA synchronous = {'FULL' if network else 'NORMAL'}")
        db.execute("PRAGMA journal_size_limit = 16777216")
        with self.transaction():  # takes the exclusive lock, kept until the file is closed
            db.execute(f"PRAGMA user_version = {self._format}")
            for statement in filter(str.strip, self._schema.split(";")):
                db.execute(statement)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block is written, or nothing of it."""
        db = self.sql
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some errors, as a full disk, have rolled back already
                db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """Run the block; where SQLite finds its file corrupt, begin a new one and leave the block."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if not _unreadable(exc):
                raise
            self._begin_anew(exc)

    def _begin_anew(self, exc: sqlite3.DatabaseError) -> None:
        aside = self.path + ".corrupt"
        self._log.warning(
            "the store %s is corrupt (%s): it is set aside as %s, a new one begins", self.path, exc, aside
        )
        if self._db is not None:
            self._db.close()
            self._db = None
        for suffix in ("-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + suffix)
        os.replace(self.path, aside)
        self._open()
        self._begun_anew()

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """What goes wrong in the block is a DaemonError: the store cannot be `what`."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            if isinstance(exc, sqlite3.Error) and _code(exc) in _HELD:
                raise DaemonError(
                    f"the store {self.path} is held by another process, perhaps in another container that shares "
                    "this directory; end it, or set XDG_CACHE_HOME to a directory of this container's own"
                ) from exc
            raise DaemonError(f"the store {self.path} cannot be {what}: {exc}") from exc

    def shrink(self) -> None:
        """Give free pages back. A script, because `execute` would stop after the first page; outside transactions."""
        self.sql.executescript("PRAGMA incremental_vacuum")

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._closed = True
        if self._db is not None:
            self._db.close()
            self._db = None


class _NotOurs(sqlite3.DatabaseError):
    """SQLite can read it, but it was not written by any rannd."""


def _unreadable(exc: sqlite3.Error) -> bool:
    return isinstance(exc, _NotOurs) or _code(exc) in _UNREADABLE


def _code(exc: sqlite3.Error) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
