"""Where an optimizer's state lies between steps, if not in the device's memory (`offload_optimizer`).

Parameters that no segment reads at the moment lie there, too (`offload_params`, see `sharded_parameters.py`).

Ranks on CPUs have it in a file that is mapped into memory: its tensors can be read and stepped as any others, and the
kernel writes them to the file and takes their memory whenever something else needs it. After a step of a bucket its
pages are the first to go; those of the next one are read while a bucket is stepped. The file has no name, so that
nobody else can open it, and nothing of it is left however the process ends.

Ranks with a GPU have it in pinned host memory, and copy it to the device for a step, and back, on a stream of its own.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import psutil
import torch

from rannd.daemon.common.paths import places
from rannd.device.identity import is_accelerator
from rannd.device.memory import trim_heap
from rannd.device.streams import SideStream
from rannd.errors import DaemonError, UsageError
from rannd.plan.zero import LEAST_OFFLOADED
from rannd.units import amount

ALIGNMENT = 64
"""Bytes: a tensor begins at a multiple of this in the file."""
MOST_LEAVING = 2
"""Values that may be on their way to the host's memory at a time."""
CHUNK = 1 << 30
"""Bytes by which the file grows at most, but for larger tensors."""
_COLD = 20
"""MADV_COLD of Linux 5.4, which Python's mmap has no name for: pages to be taken before others."""
_VALUES = "values"
"""Key of what is no optimizer's state."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class Place(NamedTuple):
    """Which tensor of an optimizer's state it is."""

    name: str
    """Of the parameter."""
    key: Any
    """In its state."""
    number: int
    """Among the tensors below that key."""


class StateHome(ABC):
    """Tensors of an optimizer's state that are elsewhere between steps.

    A tensor that goes there is one of as many elements as what the optimizer steps, at least two; others stay.
    """

    in_place: bool
    """Whether it is stepped where it is."""

    def __init__(self) -> None:
        self._homes: dict[Place, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are elsewhere between steps."""
        return sum(home.nbytes for home in self._homes.values())

    def keep(self, name: str, state: dict[str, Any], size: int) -> None:
        """Put a parameter's state where it is between steps, in place of what is in `state`.

        Args:
            name: Of the parameter.
            state: Its state, with the values to keep.
            size: Number of elements of what is stepped.

        Raises:
            UsageError: There is no room.
        """

        def kept(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() != size or size < 2 or tensor.layout is not torch.strided:
                return tensor
            home = self._homes.get(place)
            if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
                home = self._homes[place] = self._make(tensor)
            if tensor.data_ptr() != home.data_ptr():
                self._store(tensor.detach(), home)
            return home

        self._each(name, state, kept)

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor's values where they are until they are needed, and return what they are there."""
        state = {_VALUES: tensor}
        self.keep(name, state, tensor.numel())
        self.leave([name])
        return state[_VALUES]

    def prefetch(self, name: str, held: torch.Tensor) -> None:
        """Begin to bring what `hold` has returned."""
        self.ahead([name], [{_VALUES: held}])

    @abstractmethod
    def drop(self, name: str) -> None:
        """Let go of what `prefetch` has brought, and nobody has fetched."""

    def fetch(self, name: str, held: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what `hold` has returned into `target`, which is on the device."""
        state = {_VALUES: held}
        self.bring([name], [state])
        target.copy_(state[_VALUES])
        self.leave([name])

    def loan(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy that is elsewhere as long as somebody has it, and can be used as any other."""
        return tensor

    @abstractmethod
    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is elsewhere as long as somebody has it, for `back`."""

    @abstractmethod
    def coming(self, laid: Iterable[torch.Tensor]) -> None:
        """Begin to bring back what `lay` has returned."""

    @abstractmethod
    def back(self, laid: torch.Tensor) -> torch.Tensor:
        """What `lay` has returned, on the device; without a gradient."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of what `coming` has brought, and nobody has asked for."""

    def restore(self, name: str, state: dict[str, Any]) -> None:
        """Put copies in the device's memory in the place of what was kept of a parameter's state."""
        self._each(name, state, lambda place, tensor: self._back(tensor) if self._is_home(place, tensor) else tensor)

    def _is_home(self, place: Place, tensor: torch.Tensor) -> bool:
        home = self._homes.get(place)
        return home is not None and home.data_ptr() == tensor.data_ptr()

    def _each(self, name: str, state: dict[str, Any], new: Callable[[Place, torch.Tensor], torch.Tensor]) -> None:
        for key, value in state.items():
            state[key] = _replaced(value, name, key, new, [])

    @abstractmethod
    def ahead(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        """Begin to bring the state of some parameters, which are stepped next."""

    @abstractmethod
    def bring(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        """Put what can be stepped into the state of some parameters."""

    @abstractmethod
    def leave(self, names: Sequence[str]) -> None:
        """Some parameters were stepped, and their state kept: it is not needed before the next step."""

    @abstractmethod
    def finish(self) -> None:
        """After a step: all that was kept can be read."""

    @abstractmethod
    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for the values of a tensor."""

    @abstractmethod
    def _store(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        """Copy a tensor's values to its home."""

    @abstractmethod
    def _back(self, home: torch.Tensor) -> torch.Tensor:
        """A copy in the device's memory."""


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
        return torch.as_strided(found, tensor.shape, _dense_stride(tensor)).copy_(tensor)

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


class HostMemory(StateHome):
    """State in the host's memory, copied to a device for a step, and back.

    `pinned`: the copies go on beside computations.
    """

    in_place = False

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        super().__init__()
        self._device, self._pinned = device, pinned
        self._stream = SideStream(device)
        self._coming: dict[Place, torch.Tensor] = {}
        self._leaving: deque[tuple[torch.Event | None, torch.Tensor]] = deque()
        """What is being laid, with the end of its copy. Computations wait for it before its memory is used again: with
        `record_stream` the allocator would not know of the end while the host queues kernels, and take more memory."""
        self._returning: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of what was laid: this, which keeps its identity from being another's, and its copy."""

    def ahead(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        def come(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            if place not in self._coming and self._is_home(place, tensor):
                self._coming[place] = tensor.to(self._device, non_blocking=self._pinned, copy=True)
            return tensor

        with self._stream.inside():
            for name, state in zip(names, states, strict=True):
                self._each(name, state, come)

    def bring(self, names: Sequence[str], states: Sequence[dict[str, Any]]) -> None:
        self.ahead(names, states)
        self._stream.join()
        for name, state in zip(names, states, strict=True):
            self._each(name, state, lambda place, tensor: self._coming.pop(place, tensor))
            for value in state.values():
                for tensor in _tensors(value):
                    if tensor.device == self._device:
                        self._stream.lend(tensor)

    def leave(self, names: Sequence[str]) -> None:
        pass

    def drop(self, name: str) -> None:
        self._coming.pop(Place(name, _VALUES, 0), None)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        home = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=self._pinned)
        home = home.as_strided(tensor.shape, _dense_stride(tensor))
        self._stream.wait_for(self._stream.mark())
        with self._stream.inside():
            home.copy_(tensor.detach(), non_blocking=self._pinned)
            self._leaving.append((self._stream.mark(), tensor))
        while len(self._leaving) > MOST_LEAVING:
            self._stream.catch_up(self._leaving.popleft()[0])
        return home

    def coming(self, laid: Iterable[torch.Tensor]) -> None:
        new = [home for home in laid if id(home) not in self._returning]
        # Of the stream that computes, so that its memory is free as soon as it is let go of.
        copies = [torch.empty_like(home, device=self._device, requires_grad=False) for home in new]
        self._stream.wait_for(self._stream.mark())
        with self._stream.inside(), torch.no_grad():
            for home, copy in zip(new, copies, strict=True):
                copy.copy_(home, non_blocking=self._pinned)
                self._returning[id(home)] = home, copy

    def back(self, laid: torch.Tensor) -> torch.Tensor:
        self.coming([laid])
        self._stream.join()
        _, found = self._returning.pop(id(laid))
        return found

    def forget(self) -> None:
        self._stream.join()
        self._leaving.clear()
        self._returning.clear()

    def finish(self) -> None:
        self._coming.clear()
        self._stream.synchronize()

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)

    def _store(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        self._stream.wait_for(self._stream.mark())  # until it was stepped
        with self._stream.inside():
            home.copy_(tensor, non_blocking=self._pinned)
            self._stream.lend(tensor)

    def _back(self, home: torch.Tensor) -> torch.Tensor:
        return home.to(self._device, copy=True)


def state_home(device: torch.device, folder: str) -> StateHome:
    """Where a rank with this device keeps its optimizer's state; `folder` as of `MappedFile`."""
    return HostMemory(device, pinned=True) if is_accelerator(device) else MappedFile(folder)


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


def _replaced(
    value: Any, name: str, key: Any, new: Callable[[Place, torch.Tensor], torch.Tensor], seen: list[torch.Tensor]
) -> Any:
    """A nested value with `new(its place, tensor)` in place of each tensor; dicts and lists are changed themselves."""
    if isinstance(value, torch.Tensor):
        seen.append(value)
        return new(Place(name, key, len(seen) - 1), value)
    if isinstance(value, dict):
        for each in value:
            value[each] = _replaced(value[each], name, key, new, seen)
    elif isinstance(value, list):
        value[:] = [_replaced(each, name, key, new, seen) for each in value]
    elif type(value) is tuple:
        return tuple(_replaced(each, name, key, new, seen) for each in value)
    return value


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor, or of a contiguous one if its elements are not all those of its memory."""
    return torch.empty_like(tensor, device="meta").stride()


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _replaced(value, "", None, lambda _, tensor: tensor, found)
    return found
