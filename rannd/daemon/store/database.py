"""A SQLite file that is replaced if it is corrupt, and created again if it disappears.

On local filesystems the file is in WAL mode with synchronous=NORMAL: a committed write survives the death of the
process. On network filesystems there is no WAL (its shared memory does not work there) and synchronous=FULL. The
locking mode is EXCLUSIVE: another process that opens the file, such as a daemon in another container that shares the
home directory, gets an error. A file that SQLite cannot read, and cannot read again, is renamed to ``*.corrupt``, and a
new one is created.
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
"""Number of future formats that are considered possible; a file that claims a higher one is corrupt."""

ASIDE = ".corrupt"
"""Suffix of a corrupt file."""

_UNREADABLE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class Database:
    """The file. Used by one thread of one process."""

    def __init__(self, path: str, *, schema: str, number: int, busy_s: float, begun_anew: Callable[[], None]) -> None:
        """Open or create the file.

        Args:
            path: Path in an existing directory.
            schema: SQL statements that create the tables if they do not exist.
            number: Version of the schema, stored in ``user_version``.
            busy_s: Maximum seconds to wait for a previous daemon that is still closing the file.
            begun_anew: Called if the file was corrupt and a new one was created.

        Raises:
            DaemonError: Another process holds the file, it cannot be written, or a newer rannd wrote it.
        """
        self.path = path
        self._schema, self._format, self._busy_s, self._begun_anew = schema, number, busy_s, begun_anew
        self._log = logging.getLogger("rannd.Daemon")
        self._db: sqlite3.Connection | None = None
        """None: closed, or not opened again yet after it disappeared."""
        self._file: tuple[int, int] | None = None
        self._closed = False
        with self.errors("opened"), self.healing():
            self._open()

    @property
    def sql(self) -> sqlite3.Connection:
        """The open connection. If the file was deleted or moved, a new one is created, so that writes are not lost."""
        if self._closed:
            raise DaemonError(f"the store {self.path} is closed")
        if self._db is not None:
            if self._db.in_transaction or identity(self.path) == self._file:
                return self._db
            self._log.warning("the store %s was removed: a new one is created", self.path)
            self._db.close()
            self._db = None
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        return self._open()

    def _open(self) -> sqlite3.Connection:
        # Create the file with its mode here: SQLite would use the process's umask.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._file = identity(self.path)
        self._db = db = sqlite3.connect(self.path, timeout=self._busy_s, isolation_level=None)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            self._db = None  # no half-open store: the next request tries again
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        # A flipped byte may be invalid UTF-8: such a text must fail its checksum, not the query.
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        written = int(db.execute("PRAGMA user_version").fetchone()[0])
        if not 0 <= written <= self._format + PLAUSIBLE:
            raise _NotOurs(f"its format is {written}")
        if written > self._format:  # checked before anything is changed, because the file is another version's
            raise DaemonError(
                f"the store {self.path} is of format {written}, which a newer rannd wrote; this one reads "
                f"{self._format}: update it, or set XDG_CACHE_HOME to another directory"
            )
        network = on_network(self.path)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute(f"PRAGMA journal_mode = {'DELETE' if network else 'WAL'}").fetchone()
        db.execute(f"PRAGMA synchronous = {'FULL' if network else 'NORMAL'}")
        db.execute("PRAGMA journal_size_limit = 16777216")
        with self.transaction():  # takes the exclusive lock, which is held until the file is closed
            db.execute(f"PRAGMA user_version = {self._format}")
            for statement in filter(str.strip, self._schema.split(";")):
                db.execute(statement)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction."""
        db = self.sql
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some errors, such as a full disk, have rolled back already
                db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """Run the block; if SQLite finds its file corrupt, create a new one and leave the block.

        A read that fails (EIO) is an error of the block: SQLite calls that corruption, too.
        """
        try:
            yield
        except sqlite3.DatabaseError as exc:
            if not _unreadable(exc) or self._is_sound():
                raise
            self._begin_anew(exc)

    def _is_sound(self) -> bool:
        """Whether the file can be opened again, and read as a whole."""
        if self._db is not None:
            self._db.close()
            self._db = None
        try:
            found = self._open().execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as exc:
            if not _unreadable(exc):
                raise
            return False
        return bool(found == ("ok",))

    def _begin_anew(self, exc: sqlite3.DatabaseError) -> None:
        aside = self.path + ASIDE
        self._log.warning(
            "the store %s is corrupt (%s): it is renamed to %s, a new one is created", self.path, exc, aside
        )
        if self._db is not None:
            self._db.close()
            self._db = None
        for suffix in ("-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + suffix)
        os.replace(self.path, aside)
        os.utime(aside)  # commands tell users this date
        self._open()
        self._begun_anew()

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Convert errors of the block to DaemonError: 'the store cannot be `what`'."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            if isinstance(exc, sqlite3.Error) and _code(exc) in _HELD:
                raise DaemonError(
                    f"the store {self.path} is held by another process, perhaps in another container that shares "
                    "this directory; stop it, or set XDG_CACHE_HOME to a directory of this container only"
                ) from exc
            raise DaemonError(f"the store {self.path} cannot be {what}: {exc}") from exc

    def shrink(self) -> None:
        """Free unused pages, outside transactions. A script, because `execute` would stop after the first page."""
        self.sql.executescript("PRAGMA incremental_vacuum")

    def close(self) -> None:
        """Close the file; no-op if it is closed."""
        self._closed = True
        if self._db is not None:
            self._db.close()
            self._db = None


class _NotOurs(sqlite3.DatabaseError):
    """SQLite can read the file, but rannd has not written it."""


def _unreadable(exc: sqlite3.Error) -> bool:
    return isinstance(exc, _NotOurs) or _code(exc) in _UNREADABLE


def _code(exc: sqlite3.Error) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
