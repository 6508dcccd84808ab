"""Keeps compiled code for later runs: a folder of torch's own cache for each kind, and an entry of the daemon's cache.

    <cache>/compiled/<key>/          of torch: graphs, code, libraries, Triton's kernels; complete, never changed
    <cache>/compiled/.<key>.<pid>/   being made

A folder gets its name when all of it is there, so a process that is killed while it compiles leaves nothing that is
used. The entry of the same key says how large the folder is: the daemon counts it, lists it, and removes both. torch
reads its cache with pickle, therefore only from folders that belong to the user and that nobody else can enter, and
never from an entry's value.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rannd import log
from rannd.daemon.common.keys import Key, compiled_key
from rannd.daemon.common.paths import places
from rannd.daemon.common.versions import version
from rannd.device.identity import device_model
from rannd.errors import DaemonError
from rannd.runtime.compiling.kinds import Kind

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@dataclass
class KeptCode:
    """Folders of compiled code of this user on this node.

    Args:
        device: This rank's device.
        mode: The configuration item `cache`.
    """

    device: torch.device
    mode: str
    root: Path | None = None
    """The folder of all; None: nothing is kept."""
    scratch: Path | None = None
    """Where code is compiled that is not kept."""
    _versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def toolchain(self) -> str:
        """Versions of Triton and the C++ compiler."""
        return f"{self._versions['triton']}, {self._versions['c++']}"

    def __post_init__(self) -> None:
        logger = log.get("RaNNCModule")
        self._versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rannd": version(),
            "triton": _triton(),
            "c++": _compiler(),
        }
        given = os.environ.get(_INDUCTOR, "")
        if given and given != _default_folder():
            logger.info("Compiled blocks are kept in %s (%s), which rannc-cache does not list", given, _INDUCTOR)
            return
        if self.mode != "off":
            try:
                self.root = Path(places().secure_compiled())
            except (DaemonError, OSError) as exc:
                logger.warning("Compiled blocks are not kept: %s", exc)
        if self.root is None:
            self.scratch = Path(tempfile.mkdtemp(prefix="rannd-compiled-"))
            weak = self.scratch
            import atexit

            atexit.register(shutil.rmtree, weak, ignore_errors=True)

    def key(self, kind: Kind) -> Key:
        """The key of a kind's code."""
        return compiled_key(
            block=kind.digest,
            rows=kind.rows,
            device_model=device_model(self.device),
            versions=self._versions,
            flags=[
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_num_threads(),
            ],
        )

    def has(self, kind: Kind) -> bool:
        """Whether the code of a kind is there."""
        return self.root is not None and self.mode != "refresh" and (self.root / self.key(kind).digest).is_dir()

    @contextlib.contextmanager
    def opened(self, kind: Kind) -> Iterator[None]:
        """Let torch read and write the folder of a kind; what it writes is kept if the block ends without an error."""
        if self.root is None:
            if self.scratch is None:
                yield
                return
            with _folder(self.scratch):
                yield
            return
        final = self.root / self.key(kind).digest
        made = self.root / f".{final.name}.{os.getpid()}"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        try:
            old = final.is_dir() and self.mode != "refresh"
            if old:  # links, so that a torch that finds something lacking does not write into the folder itself
                shutil.copytree(final, made, copy_function=os.link, dirs_exist_ok=True)
            before = _files(made)
            with _folder(made):
                yield
            if self.mode != "readonly" and _files(made) != before:
                self._keep(made, final)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def size(self, kind: Kind) -> int:
        """Bytes of the folder of a kind; 0 if there is none."""
        if self.root is None:
            return 0
        return sum(size for _, size in _files(self.root / self.key(kind).digest))

    def _keep(self, made: Path, final: Path) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(made / "locks")
        if final.is_dir():
            shutil.rmtree(final, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(final)


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
    if path is None:
        return "none"
    return f"{os.path.realpath(path)} {os.stat(path).st_mtime_ns}"
