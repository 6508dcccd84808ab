"""What a checkpoint has beside the tensors: a manifest that tells whether it is whole, and the script's own state.

``checkpoint.json`` is the manifest; it is written last, with a digest of itself. ``script.pt`` (see script_state.py) is
written by ``torch.save``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from rannd.errors import CheckpointError
from rannd.runtime.storage.checkpoint_file import FileFacts, is_plain_name, opened

MANIFEST = "checkpoint.json"
FORMAT = 1
LARGEST = 1 << 26
"""Bytes of a manifest: several hundred thousand files."""


class Manifest(msgspec.Struct, frozen=True):
    """The file ``checkpoint.json``."""

    format: int
    prefix: str
    """What comes before the names of the model's tensors in the index."""
    ranks: int
    step: int | None
    torch: str
    files: dict[str, FileFacts]
    digest: str = ""
    """Of all that the file says beside it, see `_digest`."""

    def sealed(self) -> bytes:
        """As the file's bytes."""
        said = msgspec.json.decode(msgspec.json.encode(self, order="deterministic"))
        said["digest"] = _digest(said)
        return msgspec.json.format(msgspec.json.encode(said)) + b"\n"

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a checkpoint; None where the folder has none. CheckpointError for a damaged one."""
        path = folder / MANIFEST
        if not os.path.lexists(path):
            return None
        with opened(path, LARGEST) as file:
            data = file.read()
        try:
            told = msgspec.json.decode(data, type=_Format)
            if told.format > FORMAT:
                raise CheckpointError(
                    f"{folder} was written by a later version of rannd (format {told.format}, this one reads up to "
                    f"{FORMAT}); update rannd"
                )
            found = msgspec.json.decode(data, type=Manifest)
            digest = _digest(msgspec.json.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise CheckpointError(f"{path} is damaged: {exc}") from exc
        if found.digest != digest:
            raise CheckpointError(f"{path} is damaged: its digest is not that of what it says")
        for name in found.files:
            if not is_plain_name(name):
                raise CheckpointError(f"{path} is damaged: it names the file {name!r}")
        return found


class _Format(msgspec.Struct):
    format: int


def _digest(said: dict[str, Any]) -> str:
    """Digest of a manifest as it stands in the file, in the file's order, with an empty text as its own digest.

    Fields that this version does not know count, and those that the file lacks do not: a manifest stays whole for a
    version of rannd that has one field more, or less.
    """
    return hashlib.sha256(msgspec.json.encode({**said, "digest": ""})).hexdigest()[:16]


def manifest(prefix: str, ranks: int, step: int | None, files: Mapping[str, FileFacts]) -> Manifest:
    """The manifest of a checkpoint written now."""
    return Manifest(FORMAT, prefix, ranks, step, str(torch.__version__), dict(files))


def check_plain(value: Any, path: str) -> str:
    """'' or where in `value` something is that is not plain data: None, numbers, texts, bytes, lists, tuples, dicts."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ""
    if type(value) in (list, tuple):
        return next((wrong for n, each in enumerate(value) if (wrong := check_plain(each, f"{path}[{n}]"))), "")
    if type(value) is dict:
        for key, each in value.items():
            wrong = check_plain(key, f"a key of {path}") or check_plain(each, f"{path}[{key!r}]")
            if wrong:
                return wrong
        return ""
    return (
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; plain data is wanted: None, numbers, texts, "
        "bytes, lists, tuples and dicts"
    )
