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
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

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
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


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
        self._pages: dict[str, list[tuple[mmap.mmap, int, int]]] = {}
        """Of each parameter: the chunks, and what of them (bytes), that its state has been given."""
        self._making = ""
        self._trims = True
        """Whether malloc has memory of tensors that went to the file; at first, of tracing and profiling."""

    def keep(self, name: str, state: dict[str, Any], size: int) -> None:
        self._making = name
        super().keep(name, state, size)

    def loan(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.nbytes < LEAST_OFFLOADED else self.lay(tensor)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        # A file of its own, which goes with its memory.
        with self._told(tensor.nbytes), tempfile.TemporaryFile(dir=self._folder) as file:
            self._take(file, 0, tensor.nbytes)
            # Python's mmap would keep a descriptor for each, of which there may be too few.
            path, size = f"/proc/self/fd/{file.fileno()}", tensor.numel()
            try:
                found = torch.from_file(path, shared=True, size=size, dtype=tensor.dtype)
            except RuntimeError as exc:  # which reads as if the device had too little memory
                raise UsageError(
                    f"offload_dir={self._folder}: {amount(tensor.nbytes)} more of what is offloaded cannot be mapped "
                    f"({exc}); each tensor is a mapping, of which a process may have vm.max_map_count"
                ) from exc
        return torch.as_strided(found, tensor.shape, dense_stride(tensor)).copy_(tensor)

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
        need = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._chunk is None or self._used + need > self._room:
            self._grow(need)
        assert self._chunk is not None
        count, start = tensor.numel(), self._used
        flat = torch.frombuffer(self._chunk, dtype=tensor.dtype, count=count, offset=start)
        self._used += need
        first = start - start % mmap.PAGESIZE
        self._pages.setdefault(self._making, []).append((self._chunk, first, start + need - first))
        return flat.view(tensor.shape)

    def _grow(self, need: int) -> None:
        size = max(need, min(CHUNK, max(self._end, 1 << 20)))
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._told(size):
            self._take(self._file, self._end, size)
            self._chunk = mmap.mmap(self._file.fileno(), size, offset=self._end)
        self._end, self._used, self._room = self._end + size, 0, size

    @staticmethod
    def _take(file: IO[bytes], start: int, size: int) -> None:
        """Take room on the disk for bytes of a file: a page without would be a SIGBUS when it is written."""
        os.posix_fallocate(file.fileno(), start, size)

    @contextlib.contextmanager
    def _told(self, size: int) -> Iterator[None]:
        """UsageError where so many bytes more cannot be had."""
        try:
            yield
        except OSError as exc:
            what, advice = f"{amount(size)} more cannot be had ({exc.strerror})", ""
            if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
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
