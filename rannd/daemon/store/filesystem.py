"""Identity of files, and detection of filesystems on which SQLite's WAL mode is unreliable."""

from __future__ import annotations

import os

import psutil

_NETWORK = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "lustre", "gpfs", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph"),
        *("beegfs", "panfs", "glusterfs", "orangefs", "pvfs2", "wekafs"),
    }
)


def identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of a file, None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def on_network(path: str) -> bool:
    """Whether the file `path` is on a network filesystem or on FUSE, where WAL's shared memory is unreliable."""
    real = os.path.realpath(path)
    mounts = [part for part in psutil.disk_partitions(all=True) if _below(real, part.mountpoint)]
    if not mounts:
        return False
    # Of two mounts at the same point the later one is visible.
    return is_network(max(enumerate(mounts), key=lambda item: (len(item[1].mountpoint), item[0]))[1].fstype)


def is_network(fstype: str) -> bool:
    """Whether a filesystem type of /proc/mounts is a network filesystem or FUSE."""
    return fstype in _NETWORK or fstype.startswith("fuse")


def _below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
