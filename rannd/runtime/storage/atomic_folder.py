"""Folders that are there whole or not at all.

A checkpoint is written into a draft beside its place, ``.NAME.rannd-draft-HEX``, which takes its place when all is on
disk. Where a checkpoint is there already, the two change places in one step, and the old one goes. Where the file
system cannot do that, the old one steps aside as ``.NAME.rannd-before-HEX`` first, and is put back by whoever finds
its place empty. What is to be removed is named ``.NAME.rannd-gone-HEX`` first, so that nobody takes half of it for a
whole. Whoever writes a draft holds a lock on its token, so that drafts of the dead are told from others
(other jobs may write into the same parent folder); until it has the lock, the draft is named ``.NAME.rannd-new-HEX``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

METADATA = ".metadata"
"""The index in a folder of torch.distributed.checkpoint."""
DRAFT = ".rannd-draft-"
NEW = ".rannd-new-"
GONE = ".rannd-gone-"
BEFORE = ".rannd-before-"
TOKEN = ".token"
FORGOTTEN_S = 24 * 3600.0
"""Age of a draft that is a leftover where no lock tells."""
NEW_S = 600.0
"""Age of an empty folder that should have become a draft at once."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Draft:
    """A folder in the making. On one rank; the others write into it, too."""

    def __init__(self, place: Path, marker: str) -> None:
        """Make a draft for `place`, whose checkpoints have the file `marker`. OSError where that cannot be."""
        place.parent.mkdir(parents=True, exist_ok=True)
        recover(place)
        _check_place(place, marker)
        clean(place.parent)
        self.place = place
        self._marker = marker
        self.token = secrets.token_hex(8)
        self.folder = place.parent / f".{place.name}{DRAFT}{self.token}"
        new = place.parent / f".{place.name}{NEW}{self.token}"
        new.mkdir()
        self._lock = -1
        try:
            self._lock = os.open(new / TOKEN, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, self.token.encode())
            os.rename(new, self.folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
            raise

    def finish(self) -> None:
        """Put the draft, which is whole, in its place."""
        sync_folder(self.folder)
        _check_place(self.place, self._marker)
        parent = self.place.parent
        if not self.place.exists() or not any(self.place.iterdir()):
            os.rename(self.folder, self.place)
            sync_folder(parent)
        elif exchange(self.folder, self.place):
            sync_folder(parent)
            remove(self.folder)
        else:
            aside = parent / f".{self.place.name}{BEFORE}{self.token}"
            os.rename(self.place, aside)
            os.rename(self.folder, self.place)
            sync_folder(parent)
            remove(aside)
        os.close(self._lock)

    def drop(self) -> None:
        """Remove the draft."""
        remove(self.folder)
        os.close(self._lock)


def recover(place: Path) -> None:
    """Put back a checkpoint that had stepped aside when its successor's writer was killed."""
    if place.exists():
        return
    aside = sorted(place.parent.glob(f".{glob.escape(place.name)}{BEFORE}*"), key=lambda path: path.stat().st_mtime)
    if aside:
        with suppress(FileNotFoundError):  # another rank or job was faster
            os.rename(aside[-1], place)


def clean(parent: Path) -> None:
    """Remove what killed writers left in a folder: drafts that nobody holds, and what has a successor."""
    leftovers = [path for path in parent.glob(f".*{DRAFT}*") if not _held(path)]
    leftovers += [path for path in parent.glob(f".*{NEW}*") if _forgotten(path, NEW_S)]
    leftovers += [
        path for path in parent.glob(f".*{BEFORE}*") if (parent / path.name[1:].rpartition(BEFORE)[0]).exists()
    ]
    for path in [*leftovers, *parent.glob(f".*{GONE}*")]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder of this module's, all of it or, if killed on the way, by the next `clean`."""
    if GONE not in path.name:
        gone = path.with_name(re.sub(f"({DRAFT}|{NEW}|{BEFORE})(?=[0-9a-f]+$)", GONE, path.name))
        try:
            os.rename(path, gone)
        except OSError:  # another job was faster, or it cannot be changed: then it stays
            return
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def _held(draft: Path) -> bool:
    """Whether somebody may be writing into a draft."""
    try:
        token = os.open(draft / TOKEN, os.O_RDWR)
    except OSError:
        return not _forgotten(draft)
    try:
        fcntl.flock(token, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as exc:
        return exc.errno in (errno.EWOULDBLOCK, errno.EACCES) or not _forgotten(draft)
    finally:
        os.close(token)


def _forgotten(draft: Path, after: float = FORGOTTEN_S) -> bool:
    try:
        return time.time() - draft.stat().st_mtime > after
    except OSError:
        return False


def _check_place(place: Path, marker: str) -> None:
    """FileExistsError where there is something else than a checkpoint: it is never removed."""
    if place.is_dir() and not place.is_symlink():
        if (place / marker).exists() or not any(place.iterdir()):
            return
        raise FileExistsError(f"{place} holds other files than a checkpoint; name another folder")
    if place.exists() or place.is_symlink():
        raise FileExistsError(f"{place} is not a folder; name another one")


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names in one step; False where kernel or file system cannot do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def write_file(path: Path, data: bytes) -> None:
    """Write a file to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, where its file system does that."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(number)
