"""What the watcher does with the memory of its rank (rannd/ranks/memory_files.py) once the rank has ended.

Standard library only, see watcher.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import zlib
from collections.abc import Sequence
from typing import Any

from rannd.ranks import memory_files
from rannd.runner.watch import processes

_CHUNK = 1 << 20
_MOST_SAID = 1 << 19
"""Bytes of all descriptions, about."""
_SAID = 200
"""Bytes of one without its folder."""
FACTS = "part-{}.json"
"""Name of the file that is written last for a rank's part: size and checksum of the others, by their names."""


def held(files: Sequence[int]) -> list[dict[str, Any]]:
    """Describe what is in the files: each record's fields that a plan to rescue a step needs.

    No more than fits into a message: a script can write as many as it likes.
    """
    found: list[dict[str, Any]] = []
    left = _MOST_SAID
    for file in files:
        for _, each in memory_files.records(file):
            left -= _SAID + 6 * len(each.folder)
            if left < 0:
                return found
            fields = {"number": each.number, "step": each.step, "rank": each.rank, "size": each.size}
            found.append({**fields, "folder": each.folder})
    return found


def begin_writing(files: Sequence[int], number: int, rank: int, folder: str) -> int:
    """Write one rank's part of a kept step into the folder, in a process of its own; return its pid.

    It ends with 0, or with the errno of what has failed (255: something else).
    """
    watcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 255
    try:
        processes.die_with_parent(watcher, signal.SIGKILL)
        processes.close_all_but(list(files))  # a disk that hangs must not keep the monitor's socket open
        write(files, number, rank, folder)
        code = 0
    except OSError as error:
        code = min(error.errno or 255, 255)
    finally:
        os._exit(code)


def write(files: Sequence[int], number: int, rank: int, folder: str) -> None:
    """Write one rank's part of a kept step. OSError if it cannot be written, or is not there.

    It is not synced to the disk: a power failure here ends the job, and the next one compares checksums.
    """
    found = [(file, *each) for file in files for each in memory_files.records(file)]
    matching = [each for each in found if (each[2].number, each[2].rank) == (number, rank)]
    if not matching:
        raise FileNotFoundError(errno.ENOENT, f"the part of rank {rank} is not in memory")
    file, place, record = matching[0]
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)  # not the directory that it is in: where that is missing, a disk is not mounted
    facts = {}
    for name, length in zip(record.names, record.lengths, strict=True):
        facts[name] = {"bytes": length, "crc32": _copy(file, place, length, os.path.join(folder, name))}
        place += length
    path = os.path.join(folder, FACTS.format(rank))
    with open(path + ".part", "w", encoding="utf-8") as said:
        json.dump(facts, said)
    os.replace(path + ".part", path)


def _copy(file: int, place: int, length: int, path: str) -> int:
    """Copy bytes of a file to another one, which is made; return their checksum."""
    checksum, end = 0, place + length
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        while place < end:
            data = os.pread(file, min(_CHUNK, end - place), place)
            checksum = zlib.crc32(data, checksum)
            place += len(data)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(target, rest) :]
    finally:
        os.close(target)
    return checksum
