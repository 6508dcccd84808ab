"""What is elsewhere, in files that are mapped into memory: for ranks on CPUs.

Its tensors can be read and changed as any others, and the kernel writes them to the file and takes their memory
whenever something else needs it. After a step of a bucket its pages are the first to go; those of the next one are read
while a bucket is stepped. Files have no names, so that nobody else can open them, and nothing of them is left however
the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TypeAlias

import psutil
import torch

from rannd.daemon.common.paths import places
from rannd.device.memory import trim_heap
from rannd.errors import DaemonError, UsageError
from rannd.plan.zero import LEAST_OFFLOADED
from rannd.runtime.zero.state_home import StateHome, dense_stride
from rannd.units import amount

ALIGNMENT = 64
"""Bytes: a tensor begins at a multiple of this in the file."""
CHUNK = 1 << 30
"""Bytes by which the file grows at most, but for larger tensors."""
_COLD = 20
"""MADV_COLD of Linux 5.4, which Python's mmap has no name for: pages to be taken before others."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_Room: TypeAlias = tuple[mmap.mmap, int, int]
"""A chunk, and the first byte and the number of bytes in it."""


class MappedFile(StateHome):
    """State in a file below `folder` ('': in the cache's directory), mapped into memory.

    UsageError where no file can be made there, or where it would be in memory.
    """

    in_place = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = _folder(folder)
        self._file = _open(self._folder)
        weakref.finalize(self, self._file.close)
        self._end = self._used = self._room = 0
        """Bytes of the file; of its last chunk, used and all."""
        self._chunk: mmap.mmap | None = None
        self._pages: dict[str, list[_Room]] = {}
        """Of each parameter: the whole pages that its state is in."""
        self._free: defaultdict[int, list[_Room]] = defaultdict(list)
        """Room that was lent and is free again, by size."""
        self._making = ""
        self._trims = True
        """Whether malloc has memory of tensors that went to the file; at first, of tracing and profiling."""

    def keep(self, name: str, state: dict[str, Any], size: int) -> None:
        self._making = name
        super().keep(name, state, size)

    def loan(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.nbytes < LEAST_OFFLOADED else self.lay(tensor)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        room = self._lent(tensor.nbytes)
        found = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel())
        return torch.as_strided(found, tensor.shape, dense_stride(tensor)).copy_(tensor)

    def _lent(self, need: int) -> memoryview:
        """Room in the file, as long as the memory of a tensor that is made of it lives."""
        sizes = [size for size, free in self._free.items() if size >= need and free]
        # Room that was lent before: to ask the disk for more takes long where others write to it.
        chunk, start, size = self._free[min(sizes)].pop() if sizes else self._taken(need)
        view = memoryview(chunk)[start : start + need]
        end = weakref.finalize(view, self._free[size].append, (chunk, start, size))
        end.atexit = False
        return view

    def coming(self, laid: Iterable[torch.Tensor]) -> None:
        pass

    def back(self, laid: torch.Tensor) -> torch.Tensor:
        return laid.detach()

    def forget(self) -> None:
        pass

    def ahead(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        self._advise(names, mmap.MADV_WILLNEED)

    def drop(self, name: str) -> None:
        pass

    def bring(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        pass

    def leave(self, names: Sequence[str]) -> None:
        self._advise(names, _COLD)
        if self._trims:  # else malloc keeps the state of all buckets of a first step
            self._trims = False
            trim_heap()

    def finish(self) -> None:
        pass

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        chunk, start, size = self._taken(tensor.nbytes)
        first = start - start % mmap.PAGESIZE
        self._pages.setdefault(self._making, []).append((chunk, first, start + size - first))
        return torch.frombuffer(chunk, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)

    def _taken(self, need: int) -> _Room:
        """Room in the file that nothing has been in."""
        size = -(-need // ALIGNMENT) * ALIGNMENT
        if self._chunk is None or self._used + size > self._room:
            self._grow(size)
        assert self._chunk is not None
        start = self._used
        self._used += size
        return self._chunk, start, size

    def _grow(self, need: int) -> None:
        need, size = (
            -(-each // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            for each in (need, max(need, min(CHUNK, max(self._end, 1 << 20))))
        )
        # Room on the disk: a page without would be a SIGBUS when it is written.
        with self._told(need):
            try:
                os.posix_fallocate(self._file.fileno(), self._end, size)
            except OSError as exc:
                if exc.errno not in _FULL or size == need:
                    raise
                size = need
                os.posix_fallocate(self._file.fileno(), self._end, size)
            self._chunk = mmap.mmap(self._file.fileno(), size, offset=self._end)
        self._end, self._used, self._room = self._end + size, 0, size

    @contextlib.contextmanager
    def _told(self, size: int) -> Iterator[None]:
        """UsageError where so many bytes more cannot be had."""
        try:
            yield
        except OSError as exc:
            what, advice = f"{amount(size)} more cannot be had ({exc.strerror})", ""
            if exc.errno in _FULL:
                free = shutil.disk_usage(self._folder).free
                what = (
                    f"no room for {amount(size)} more of what is offloaded, beside {amount(self._end)} of this file "
                    f"({exc.strerror}; {amount(free)} are free)"
                )
                advice = (
                    "; choose a folder with more space, or set offload_optimizer, offload_params or "
                    "offload_activations to false"
                )
            raise UsageError(f"offload_dir={self._folder}: {what}{advice}") from exc

    def _store(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        home.copy_(tensor)
        self._trims = True

    def _back(self, home: torch.Tensor) -> torch.Tensor:
        return home.clone()

    def _advise(self, names: Sequence[str], advice: int) -> None:
        for name in names:
            for chunk, start, length in self._pages.get(name, ()):
                try:
                    chunk.madvise(advice, start, length)
                except OSError:  # an older kernel, which decides by itself
                    return


def _folder(given: str) -> str:
    if not given:
        try:
            return places().secure_offload()
        except DaemonError as exc:
            raise UsageError(f"{exc}; or name a folder on a disk with offload_dir (RANNC_OFFLOAD_DIR)") from exc
    folder = os.path.abspath(given)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"offload_dir={given} cannot be made: {exc.strerror} ({exc.filename})") from exc
    return folder


def _open(folder: str) -> IO[bytes]:
    """A new file without a name, that this user alone can read."""
    kind = _filesystem(folder)
    if kind in _IN_MEMORY:
        raise UsageError(
            f"offload_dir={folder} is a {kind}, which is in memory: nothing would be saved; name a folder on a disk "
            "with offload_dir (RANNC_OFFLOAD_DIR)"
        )
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as exc:
        raise UsageError(f"offload_dir={folder}: no file can be made there: {exc.strerror}") from exc


def _filesystem(folder: str) -> str:
    """Its type, as in /proc/mounts; '' if not known."""
    device = os.stat(folder).st_dev
    for part in psutil.disk_partitions(all=True):
        try:
            if os.stat(part.mountpoint).st_dev == device:
                return part.fstype
        except OSError:
            continue
    return ""
