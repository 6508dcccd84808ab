"""Files that users hand around: read with suspicion, written whole or not at all, never through a symbolic link."""

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


@dataclass(frozen=True)
class PlainFile:
    """One kind of file. `what`: as in messages, 'deployment'; `made_by`: what writes such files."""

    what: str
    made_by: str
    error: type[RanndError]
    most_bytes: int

    def read(self, file: Path) -> bytes:
        """The whole content of a file that `write` wrote; whoever decodes it checks what is in it.

        Raises:
            RanndError: (`error`) As `reading` does.
        """
        with self.reading(file) as opened:
            data = opened.read(self.most_bytes + 1)
        if len(data) > self.most_bytes:  # it has grown since, or is of a file system that tells no sizes
            self._too_large(file, len(data))
        return data

    @contextmanager
    def reading(self, file: Path) -> Iterator[BinaryIO]:
        """A file that `write` or `writing` wrote, open for reading; whoever decodes it checks what is in it.

        It may belong to another user, because it is data and is checked as such; but nobody besides its owner (and
        group) may have been able to change it.

        Raises:
            RanndError: (`error`) There is no such file, or it is a symbolic link, no plain file, too large, or
                writable for everybody.
        """
        file = file.expanduser()
        try:
            # Without O_NONBLOCK the opening of a pipe would wait for ever.
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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
        """What is wrong with the content of a file (`error`) is told with the file's name."""
        try:
            yield
        except self.error as exc:
            raise self.error(f"{file}: {exc}") from exc

    def _check(self, file: Path, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise self.error(f"the {self.what} {file} is no plain file; name a file that {self.made_by} wrote")
        if found.st_mode & stat.S_IWOTH:
            raise self.error(
                f"the {self.what} {file} can be changed by every user of the machine; take that right away (chmod o-w "
                f"{file}) if you trust what is in it"
            )
        if found.st_size > self.most_bytes:
            self._too_large(file, found.st_size)

    def _too_large(self, file: Path, size: int) -> NoReturn:
        raise self.error(
            f"the {self.what} {file} has {size} bytes, more than {self.most_bytes}; name a file that "
            f"{self.made_by} wrote"
        )

    def write(self, data: bytes, file: Path) -> None:
        """Write a file, whole or not at all, in place of the one that may be there.

        Raises:
            RanndError: (`error`) The file is a symbolic link or a folder, or cannot be written.
        """
        with self.writing(file) as opened:
            opened.write(data)

    @contextmanager
    def writing(self, file: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
        """A file to write in parts, which takes the place of the one that may be there when the block ends.

        Args:
            file: Where it will be. A block that raises leaves what is there.
            mode: Rights of the file, of which the process's umask takes some away.

        Raises:
            RanndError: (`error`) The file is a symbolic link or a folder, or cannot be written.
        """
        file = file.expanduser().absolute()
        if os.path.islink(file):
            raise self.error(
                f"the {self.what} is not written to {file}, a symbolic link to {os.readlink(file)}; name the file "
                "itself"
            )
        if _is_special(file):  # root could replace /dev/null
            raise self.error(f"the {self.what} is not written to {file}, which is no plain file; name another")
        draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(draft, flags, mode), "wb") as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
            # Where a link has come into the way meanwhile, it is replaced, not followed.
            os.replace(draft, file)
        except BaseException as exc:
            with suppress(OSError):
                draft.unlink()
            if not isinstance(exc, OSError):
                raise
            raise self.error(
                f"the {self.what} cannot be written to {file}: {exc.strerror}; name a file in a folder that is there"
            ) from exc


def _is_special(file: Path) -> bool:
    """Whether there is something that is neither a plain file nor a folder; what cannot be looked at is told later."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
