"""The archives that ``torch.save`` writes: zip files with a pickle and the bytes of storages, all of them stored."""

from __future__ import annotations

import errno
import io
import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

LARGEST_PICKLE = 1 << 28
"""Bytes of the pickle in an archive, and of its list of members."""
_LOCAL = struct.Struct("<4s22x2H")
"""The part of a member's header that says where its bytes begin."""


@dataclass(frozen=True)
class Bytes:
    """Bytes in a file: where they begin, and how many they are."""

    begin: int
    count: int

    def read(self, file: BinaryIO) -> torch.Tensor:
        """The bytes, of type uint8. OSError where they are not all there."""
        found = torch.empty(self.count, dtype=torch.uint8)
        file.seek(self.begin)
        into: Any = file
        if into.readinto(memoryview(found.numpy())) != self.count:  # type: ignore[arg-type]
            raise OSError(errno.EIO, "it ends too early")
        return found


class Archive:
    """An archive inside of a file.

    Raises:
        ValueError: It is none, or one that torch.save does not write.
    """

    def __init__(self, file: BinaryIO, begin: int, count: int) -> None:
        """`begin` and `count`: where it lies in the file, in bytes."""
        self._slice = _Slice(file, begin, count)
        self._begin = begin
        self._left = count
        try:
            with zipfile.ZipFile(self._slice) as opened:
                self._members = {each.filename: each for each in opened.infolist()}
        except Exception as exc:  # zipfile raises all kinds of errors for a damaged file
            raise ValueError(f"it holds no archive of torch.save: {exc}") from exc
        self._root = next(iter(self._members), "").partition("/")[0]
        self._storages: dict[str, Bytes] = {}
        if f"{self._root}/byteorder" in self._members and self._content("byteorder", 16) != sys.byteorder.encode():
            raise ValueError("it was written by a machine with another order of bytes")

    def pickle(self) -> bytes:
        """The pickle that describes the value."""
        return self._content("data.pkl", LARGEST_PICKLE)

    def storage(self, key: str) -> Bytes:
        """Where the bytes of a storage are. All storages together have no more bytes than the archive."""
        if key not in self._storages:
            found = self._place(f"data/{key}")
            self._left -= found.count
            if self._left < 0:
                raise ValueError("its members lie one over the other")
            self._storages[key] = found
        return self._storages[key]

    def _content(self, name: str, most: int) -> bytes:
        found = self._place(name)
        if found.count > most:
            raise ValueError(f"its member {name} has {found.count} bytes, more than {most}")
        self._slice.seek(found.begin - self._begin)
        return self._slice.read(found.count)

    def _place(self, name: str) -> Bytes:
        member = self._members.get(f"{self._root}/{name}")
        if member is None:
            raise ValueError(f"its member {name} is missing")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise ValueError(f"its member {name} is compressed, as torch.save does not write it")
        if not 0 <= member.header_offset <= self._slice.count - _LOCAL.size:
            raise ValueError(f"its member {name} begins outside of it")
        self._slice.seek(member.header_offset)
        header = self._slice.read(_LOCAL.size)
        if not header.startswith(b"PK\3\4"):
            raise ValueError(f"its member {name} has no header")
        begin = member.header_offset + _LOCAL.size + sum(_LOCAL.unpack(header)[1:])
        if begin + member.file_size > self._slice.count:
            raise ValueError(f"its member {name} ends outside of it")
        return Bytes(self._begin + begin, member.file_size)


class _Slice(io.RawIOBase):
    """A part of a file as a file, for zipfile, which is given no more at a time than a list of members has."""

    def __init__(self, file: BinaryIO, begin: int, count: int) -> None:
        self._file = file
        self._begin = begin
        self.count = count
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.count}[whence]
        if not 0 <= at <= self.count:
            raise OSError(errno.EINVAL, "it points out of its place in the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self.count - self._at
        size = left if size is None or size < 0 else min(size, left)
        if size > LARGEST_PICKLE:
            raise ValueError(f"a part of it has more than {LARGEST_PICKLE} bytes")
        self._file.seek(self._begin + self._at)
        found = self._file.read(size)
        self._at += len(found)
        return found
