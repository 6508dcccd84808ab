"""Folders that are there whole or not at all.

A checkpoint is written into a draft beside its place, ``.NAME.rannd-draft-HEX``, which takes its place when all is on
disk. Where a checkpoint is there already, the two change places in one step, and the old one goes. Where the file
system cannot do that, the old one steps aside as ``.NAME.rannd-before-HEX`` first, and is put back by whoever finds its
place empty and its writer, which holds the draft of the same HEX, dead. What is to be removed is named ``.NAME.rannd-
gone-HEX`` first, so that nobody takes half of it for a whole. Whoever writes a draft holds a lock on its token, so that
drafts of the dead are told from others (other jobs may write into the same parent folder); until it has the lock, the
draft is named ``.NAME.rannd-new-HEX``.
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
WRITER_S = 10.0
"""Seconds to wait for a living writer that has moved the old checkpoint aside; the next call of it ends that."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class UnsyncedError(OSError):
    """The new folder is in its place, but that is not known to be on disk."""


class Draft:
    """A folder in the making. On one rank; the others write into it, too."""

    def __init__(self, place: Path, marker: str) -> None:
        """Make a draft for `place`, whose checkpoints have the file `marker`. OSError where that cannot be."""
        _make_folder(place.parent)
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
        """Put the draft, which is whole, in its place.

        UnsyncedError where it is there, but would perhaps not survive a power failure; what was there before then stays
        beside it until the next draft.
        """
        sync_folder(self.folder)
        _check_place(self.place, self._marker)
        parent = self.place.parent
        if not self.place.exists() or not any(self.place.iterdir()):
            os.rename(self.folder, self.place)
            old = None
        elif exchange(self.folder, self.place):
            old = self.folder
        else:
            old = parent / f".{self.place.name}{BEFORE}{self.token}"
            self._replace(old)
        try:
            sync_folder(parent)
            if old is not None:
                remove(old)
        except OSError as exc:
            raise UnsyncedError(exc.errno, exc.strerror, str(parent)) from exc
        finally:
            os.close(self._lock)

    def _replace(self, aside: Path) -> None:
        """Put the draft in its place in two steps: another job may put the old folder back in between."""
        deadline = time.monotonic() + WRITER_S
        while True:
            os.rename(self.place, aside)
            try:
                os.rename(self.folder, self.place)
                return
            except OSError as exc:
                if exc.errno not in _TAKEN or time.monotonic() > deadline:
                    with suppress(OSError):  # only rannd would look for it beside its place
                        os.rename(aside, self.place)
                    raise

    def drop(self) -> None:
        """Remove the draft."""
        remove(self.folder)
        os.close(self._lock)


def recover(place: Path) -> None:
    """Put back a checkpoint that had stepped aside when its successor's writer was killed."""
    deadline = time.monotonic() + WRITER_S
    while not place.exists() and (aside := list(place.parent.glob(f".{glob.escape(place.name)}{BEFORE}*"))):
        drafts = (place.parent / path.name.replace(BEFORE, DRAFT) for path in aside)
        if time.monotonic() < deadline and any(path.exists() and _held(path) for path in drafts):
            time.sleep(0.01)  # a living writer puts its draft there
            continue
        try:
            os.rename(max(aside, key=lambda path: path.stat().st_mtime), place)
        except OSError as exc:  # another rank or job was faster
            if exc.errno not in (errno.ENOENT, *_TAKEN):
                raise
            return


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, on disk: else a power failure takes them with all that is in them."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


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
