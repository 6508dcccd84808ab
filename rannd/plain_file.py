"""Reads and atomically writes files that users exchange (deployments, profiles); never follows symbolic links."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from rannd.errors import RanndError

READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a file that somebody else has made: without O_NONBLOCK, opening a pipe would block forever."""


@dataclass(frozen=True)
class PlainFile:
    """Reader and writer of one kind of file.

    Args:
        what: Kind of file in messages, such as 'deployment'.
        made_by: What writes such files, for messages.
        error: Class of the errors that are raised.
        most_bytes: Maximum size of a file.
    """

    what: str
    made_by: str
    error: type[RanndError]
    most_bytes: int

    def read(self, file: Path) -> bytes:
        """Return the content of a file; the caller validates it when decoding.

        Raises:
            RanndError: (`error`) As for `reading`.
        """
        with self.reading(file) as opened:
            data = opened.read(self.most_bytes + 1)
        if len(data) > self.most_bytes:  # the file has grown since, or its file system reports no sizes
            self._too_large(file, len(data))
        return data

    @contextmanager
    def reading(self, file: Path) -> Iterator[BinaryIO]:
        """Open a file for reading; the caller validates the content when decoding.

        The file may belong to another user, because its content is validated; but it must not be writable for
        everybody.

        Raises:
            RanndError: (`error`) The file does not exist, is a symbolic link, is not a regular file, is too large, or
                is writable for everybody.
        """
        file = self._expanded(file)
        try:
            descriptor = os.open(file, READING)
            try:
                self._check(file, os.fstat(descriptor))
                with open(descriptor, "rb", closefd=False) as opened:
                    yield opened
            finally:
                os.close(descriptor)
        except OSError as exc:
            if os.path.islink(file):
                raise self.error(
                    f"the {self.what} {file} is a symbolic link to {os.readlink(file)}; name the file itself"
                ) from exc
            raise self.error(
                f"the {self.what} {file} cannot be read: {exc.strerror}; name a file that {self.made_by} wrote"
            ) from exc

    @contextmanager
    def named(self, file: Path) -> Iterator[None]:
        """Prefix errors about the content of a file (`error`) with the file's name."""
        try:
            yield
        except self.error as exc:
            raise self.error(f"{file}: {exc}") from exc

    def _expanded(self, file: Path) -> Path:
        try:
            return file.expanduser()
        except RuntimeError as exc:
            raise self.error(f"the {self.what} {file}: {exc}; name the file with its whole path") from exc

    def _check(self, file: Path, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise self.error(f"the {self.what} {file} is not a regular file; name a file that {self.made_by} wrote")
        if found.st_mode & stat.S_IWOTH:
            raise self.error(
                f"the {self.what} {file} is writable for every user of the machine; if you trust its content, remove "
                f"this permission (chmod o-w {file})"
            )
        if found.st_size > self.most_bytes:
            self._too_large(file, found.st_size)

    def _too_large(self, file: Path, size: int) -> NoReturn:
        raise self.error(
            f"the {self.what} {file} has {size} bytes, more than {self.most_bytes}; name a file that "
            f"{self.made_by} wrote"
        )

    def write(self, data: bytes, file: Path) -> None:
        """Write a file atomically, replacing an existing one.

        Raises:
            RanndError: (`error`) The file is a symbolic link or a folder, or cannot be written.
        """
        with self.writing(file) as opened:
            opened.write(data)

    def ensure_writable(self, file: Path) -> None:
        """Do all of `write` but replacing the file, before the work whose result is to be written.

        Raises:
            RanndError: (`error`) As for `write`.
        """
        with suppress(_NotReplaced), self.writing(file):
            raise _NotReplaced

    @contextmanager
    def writing(self, file: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
        """Open a temporary file that replaces `file` when the block ends without an exception.

        Args:
            file: Path of the file. If the block raises, an existing file stays unchanged.
            mode: Permissions of the file, before the process's umask is applied.

        Raises:
            RanndError: (`error`) The file is a symbolic link or a folder, or cannot be written.
        """
        file = self._expanded(file).absolute()
        if not file.name:
            raise self.error(f"the {self.what} is not written to {file}, a folder; name a file in it")
        if os.path.islink(file):
            raise self.error(
                f"the {self.what} is not written to {file}, a symbolic link to {os.readlink(file)}; name the file "
                "itself"
            )
        if _is_special(file):  # root could replace /dev/null
            raise self.error(f"the {self.what} is not written to {file}, which is not a regular file; name another")
        draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(draft, flags, mode), "wb") as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
            # A symbolic link that was created meanwhile is replaced, not followed.
            os.replace(draft, file)
        except BaseException as exc:
            with suppress(OSError):
                draft.unlink()
            if not isinstance(exc, OSError):
                raise
            raise self.error(
                f"the {self.what} cannot be written to {file}: {exc.strerror}; name a file in an existing folder that "
                "you may write to"
            ) from exc


class _NotReplaced(Exception):
    """Ends `PlainFile.writing` before it replaces the file."""


def _is_special(file: Path) -> bool:
    """Whether a path is neither a regular file nor a folder; False if it cannot be examined (writing then fails)."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
