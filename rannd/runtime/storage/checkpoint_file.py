"""Opens the files of a checkpoint's folder, whoever made it: regular files only, of the size that they should have.

A symbolic link is refused: it leads out of the folder, to a file that is not the checkpoint's. (The folder itself may
be reached by one.)
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from rannd.errors import CheckpointError
from rannd.plain_file import READING

CHUNK = 16 << 20


class FileFacts(msgspec.Struct, frozen=True):
    """What tells whether a file is whole."""

    bytes: int
    crc32: int


def facts(path: Path) -> FileFacts:
    """Size and checksum of a file. CheckpointError where it cannot be read."""
    with opened(path) as file:
        return _facts(file)


def _facts(file: BinaryIO) -> FileFacts:
    size = crc = 0
    while chunk := file.read(CHUNK):
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
    return FileFacts(size, crc)


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the folder where it stands, and of nothing else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


@contextmanager
def opened(path: Path, most: int | None = None, exactly: int | None = None) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint for reading.

    Args:
        path: The file.
        most: Maximum size in bytes.
        exactly: Size in bytes with which it was written.

    Raises:
        CheckpointError: There is none, it is a symbolic link, a pipe, a device or a folder, has another size, or cannot
            be read, also inside the block.
    """
    try:
        descriptor = os.open(path, READING)
        try:
            _check(path, os.fstat(descriptor), most, exactly)
            with open(descriptor, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(descriptor)
    except OSError as exc:
        if os.path.islink(path):
            raise CheckpointError(
                f"{path} is a symbolic link to {os.readlink(path)}, and cannot be read: what it leads to is not the "
                "checkpoint's; put the file itself into the folder"
            ) from exc
        raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _check(path: Path, found: os.stat_result, most: int | None, exactly: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is damaged: it is not a regular file")
    if exactly is not None and found.st_size != exactly:
        raise CheckpointError(f"{path} is damaged: it has {found.st_size} bytes, it was written with {exactly}")
    if most is not None and found.st_size > most:
        raise CheckpointError(f"{path} is damaged: it has {found.st_size} bytes, more than {most}")


@contextmanager
def checked(path: Path, most: int | None, wanted: FileFacts | None) -> Iterator[BinaryIO]:
    """`opened`, with the content compared with what was written; CheckpointError where it is another."""
    with opened(path, most, None if wanted is None else wanted.bytes) as file:
        if wanted is not None and (now := _facts(file)) != wanted:
            raise CheckpointError(
                f"{path} is damaged: {now.bytes} bytes with checksum {now.crc32:08x}, it was written with "
                f"{wanted.bytes} and {wanted.crc32:08x}. Nothing was loaded"
            )
        file.seek(0)
        yield file
