"""Keeps compiled code for later runs: a folder of torch's own cache for each kind, and an entry of the daemon's cache.

    <cache>/compiled/<key>/          of torch: graphs, code, libraries, Triton's kernels; complete, never changed
    <cache>/compiled/.<key>.<pid>/   being made

A folder gets its name when all of it is there, so a process that is killed while it compiles leaves nothing that is
used. It has a checksum of its files: torch would stumble in each run over what a power cut or a full disk has cut off,
and may crash with such a library. The entry of the same key says how large the folder is: the daemon counts it, lists
it, and removes both. torch reads its cache with pickle, therefore only from folders that belong to the user and that
nobody else can enter, and never from an entry's value.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from rannd import log
from rannd.daemon.common.keys import Key, compiled_key
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.device.identity import device_model
from rannd.device.kernel_flags import kernel_flags
from rannd.errors import DaemonError
from rannd.runtime.compiling.kinds import Kind
from rannd.sources import digest_of

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_CHECKSUM = "rannd.sha256"


class KeptCode:
    """Folders of compiled code of this user on this node.

    Args:
        device: This rank's device.
        mode: The configuration item `cache`.
    """

    def __init__(self, device: torch.device, mode: str) -> None:
        self.device = device
        self.mode = mode
        self.versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rannd": version(),
            "rannd source": digest_of(("runtime/compiling",))[:16],
            "triton": _triton(),
            "c++": _compiler(),
        }
        self.root: Path | None = None
        """The folder of all folders; None: code is not kept."""
        self._scratch: Path | None = None
        """Where code is compiled that is not kept; None: in the user's own folder."""
        given = os.environ.get(_INDUCTOR, "")
        if given and given != _default_folder():
            _tell(f"Compiled blocks are kept in {given} ({_INDUCTOR}), which rannc-cache does not list")
            return
        if mode != "off":
            try:
                self.root = Path(places().secure_compiled())
            except (DaemonError, OSError) as exc:
                _tell(f"Compiled blocks are not kept: {exc}")
        if self.root is None:
            self._scratch = _scratch()

    @property
    def toolchain(self) -> str:
        """Versions of Triton and the C++ compiler."""
        return f"{self.versions['triton']}, {self.versions['c++']}"

    def key(self, kind: Kind) -> Key:
        """The key of a kind's code."""
        return self.make_key(kind.digest, kind.rows)

    def has(self, kind: Kind) -> bool:
        """Whether the code of a kind is there."""
        return self.root is not None and self.mode != "refresh" and (self.root / self.key(kind).digest).is_dir()

    def used(self) -> Iterator[tuple[Key, int]]:
        """Keys and bytes of the folders that this process has used since the last call."""
        while self.root is not None and _used:
            key, _ = _used.popitem()
            size = sum(size for _, size in _files(self.root / key.digest))
            if size:
                yield key, size

    @contextlib.contextmanager
    def opened(self, kind: Kind) -> Iterator[None]:
        """Let torch read and write the folder of a kind; what it writes is kept if the block ends without an error."""
        with self.opened_key(self.key(kind)):
            yield

    @contextlib.contextmanager
    def opened_key(self, key: Key) -> Iterator[None]:
        """As `opened`, for any key."""
        if self.root is None:
            with contextlib.nullcontext() if self._scratch is None else _folder(self._scratch):
                yield
            return
        _used[key] = None
        final = self.root / key.digest
        made = self.root / f".{key.digest}.{os.getpid()}"
        shutil.rmtree(made, ignore_errors=True)
        try:
            # A copy, so that a torch that finds something lacking does not write into the folder itself.
            if self.mode != "refresh" and final.is_dir():
                with contextlib.suppress(OSError):  # what is replaced or removed meanwhile is made again
                    shutil.copytree(final, made)
                if not _whole(made):
                    shutil.rmtree(made, ignore_errors=True)
            made.mkdir(mode=0o700, exist_ok=True)
            before = _files(made)
            with _folder(made):
                yield
            if self.mode != "readonly" and _files(made) != before:
                shutil.rmtree(made / "locks", ignore_errors=True)
                (made / _CHECKSUM).write_text(_checksum(made))
                shutil.rmtree(final, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process was faster
                    made.rename(final)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def make_key(self, block: str, rows: int) -> Key:
        """The key of code for a hash, or words, and rows."""
        return compiled_key(
            block=block,
            rows=rows,
            device_model=device_model(self.device),
            versions=self.versions,
            flags=kernel_flags(self.device),
        )


@functools.cache
def _tell(text: str) -> None:
    log.get("RaNNCModule").info("%s", text)


@functools.cache
def _scratch() -> Path:
    """A folder that is removed when the process ends."""
    made = Path(tempfile.mkdtemp(prefix="rannd-compiled-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


_used: dict[Key, None] = {}


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make `path` the folder of torch's cache, which reads it from the environment."""
    before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    os.environ[_INDUCTOR] = str(path)
    os.environ.pop(_TRITON, None)  # inductor sets it to a folder in its own
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _files(folder: Path) -> frozenset[tuple[str, int]]:
    """Names and sizes of all files below a folder, without locks."""
    found = set()
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".lock"):
                path = os.path.join(place, name)
                with contextlib.suppress(OSError):
                    found.add((os.path.relpath(path, folder), os.stat(path).st_size))
    return frozenset(found)


def _whole(folder: Path) -> bool:
    """Whether the files of a folder are those that it was kept with."""
    try:
        return (folder / _CHECKSUM).read_text() == _checksum(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(folder: Path) -> str:
    """Of the names and contents of all files that code consists of."""
    found = hashlib.sha256()
    for name, size in sorted(_files(folder)):
        if name != _CHECKSUM:
            found.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
            found.update((folder / name).read_bytes())
    return found.hexdigest()


def _default_folder() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def _triton() -> str:
    for name in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "none"


def _compiler() -> str:
    """The C++ compiler that torch calls: its path, and when it was changed."""
    path = shutil.which(os.environ.get("CXX") or "g++")
    return "none" if path is None else f"{os.path.realpath(path)} {os.stat(path).st_mtime_ns}"
