"""Files in memory that a rank shares with its watcher: what a rank has written there outlives it.

The watcher makes them (memfd), and the rank inherits them. Each holds records one after the other: those of one step of
a training, which is this rank's own part or copies of others' parts. A record is::

    8 bytes      MAGIC once the record is whole, zeros before
    8,184 bytes  header: a `KeptPart` as JSON, filled with spaces
    blobs        as long as the header says

Standard library only: the watcher runs without site-packages.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

VARIABLE = "RANND_MEMORY"
"""Environment variable with the files' descriptors and the process that has them: ``9,10,11,12:4711``."""
_NAME = "rannd-part-"
COUNT = 4
"""Number of files: this rank's own part of two steps, and copies of others' parts of two steps."""
MAGIC = b"rannd-01"
FIRST = 8192
"""Bytes before the first blob of a record."""
MOST_RANKS = 1 << 20
RESCUED = ".rescued-"
"""Part of the name of a folder in which parts of a step are that were written after a failure."""


class RecordError(Exception):
    """What is in a file is no record."""


@dataclass(frozen=True)
class KeptPart:
    """A rank's part of a step."""

    number: int
    """Counts the steps that were kept since the ranks were started; the same on all ranks."""
    step: int
    rank: int
    size: int
    """Number of ranks, each of which has a part."""
    folder: str
    """Where the checkpoints of the training are."""
    names: list[str]
    """Names of the files that the blobs are to be written to."""
    lengths: list[int]
    """Bytes of the blobs."""

    def prefix(self) -> bytes:
        """All that comes before the blobs, but not whole yet: with zeros in the place of MAGIC."""
        header = json.dumps(asdict(self), ensure_ascii=False).encode(errors="surrogateescape")
        if len(header) > FIRST - len(MAGIC):
            raise RecordError(f"a header of {len(header)} bytes, more than {FIRST - len(MAGIC)}")
        return bytes(len(MAGIC)) + header.ljust(FIRST - len(MAGIC))

    @property
    def bytes(self) -> int:
        """Of the whole record."""
        return FIRST + sum(self.lengths)

    def __post_init__(self) -> None:
        numbers = (self.number, self.step, self.rank, self.size, *self.lengths)
        if any(type(each) is not int or not 0 <= each < 1 << 62 for each in numbers):
            raise RecordError(f"a record has the numbers {numbers}")
        there = self.rank < self.size <= MOST_RANKS and os.path.isabs(self.folder)
        if not there or len(self.names) != len(self.lengths):
            raise RecordError("a record contradicts itself")
        for name in self.names:
            if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
                raise RecordError(f"{name!r} is no name of a file")


def make() -> list[int]:
    """Make the files, empty. OSError where there is no memory, or too many files are open."""
    made: list[int] = []
    try:
        for number in range(COUNT):
            made.append(os.memfd_create(f"{_NAME}{number}", os.MFD_CLOEXEC))
    except OSError:
        for each in made:
            os.close(each)
        raise
    return made


def give(files: list[int]) -> None:
    """Let the program that this process executes next have the files."""
    for each in files:
        os.set_inheritable(each, True)
    os.environ[VARIABLE] = f"{','.join(map(str, files))}:{os.getpid()}"


def given() -> list[int]:
    """Descriptors of this process's files; [] where nobody keeps them, and in processes that a rank has started."""
    numbers, _, owner = os.environ.get(VARIABLE, "").partition(":")
    if owner != str(os.getpid()):
        return []
    found = [int(each) for each in numbers.split(",") if each.isdecimal()]
    return found if len(found) == COUNT and all(map(_is_ours, found)) else []


def _is_ours(file: int) -> bool:
    """Whether a descriptor is still that of such a file: a script may have closed it, and opened another."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{_NAME}")
    return False


def records(file: int) -> Iterator[tuple[int, KeptPart]]:
    """Yield the whole records of a file, each with the place of its first blob; what follows a broken one is left."""
    place = 0
    with contextlib.suppress(OSError, RecordError, ValueError, TypeError, RecursionError):
        end = os.fstat(file).st_size
        while place + FIRST <= end:
            start = os.pread(file, FIRST, place)
            if not start.startswith(MAGIC):
                return
            record = KeptPart(**json.loads(start[len(MAGIC) :].decode(errors="surrogateescape")))
            if place + record.bytes > end:
                return
            yield place + FIRST, record
            place += record.bytes


def spoil(file: int, place: int = 0) -> None:
    """Say that the record that begins at `place` is not whole."""
    os.pwrite(file, bytes(len(MAGIC)), place)


def set_whole(file: int, place: int) -> None:
    """Say that the record that begins at `place` is whole."""
    os.pwrite(file, MAGIC, place)


def rescue_folder(folder: str, step: int, token: str) -> str:
    """Where the parts of a step are written to after a failure, in the folder of the checkpoints."""
    return os.path.join(folder, f"step-{step:08d}{RESCUED}{token}")
