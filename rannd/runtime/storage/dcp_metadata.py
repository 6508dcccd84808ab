"""The index of a torch.distributed.checkpoint folder, ``.metadata``: a pickle, read here without unpickling.

torch reads it with ``pickle.load``. Here torch's classes are made from records (see pickle_reader.py), every value
checked: sizes, places, and that the parts of each tensor cover it exactly.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rannd.daemon.common.printable import plain
from rannd.errors import CheckpointError
from rannd.runtime.storage.atomic_folder import METADATA
from rannd.runtime.storage.checkpoint_file import FileFacts, checked, is_plain_name
from rannd.runtime.storage.chunks import check_cover
from rannd.runtime.storage.pickle_reader import Name, PickleReader, Record, as_list, number, text

_HOME = "torch.distributed.checkpoint."
_MEMBER = "builtins.getattr"
"""How Python 3.11.0 to 3.11.3 writes a member of an enumeration: by the name of its class and its own."""
_RECORDS = {
    f"{_HOME}metadata.{name}"
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{_HOME}filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

LARGEST = 1 << 30
"""Bytes of an index: some ten million parts of tensors."""
_DIMENSIONS = 64
_PATH = 4096


def read_index(folder: Path, wanted: FileFacts | None = None) -> Metadata:
    """The index of a checkpoint's folder.

    CheckpointError where there is none, it is not the `wanted` file, or it holds what an index cannot.
    """
    path = folder / METADATA
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} is no checkpoint: it has no file {METADATA}")
    with checked(path, LARGEST, wanted) as file:
        data = file.read()
    try:
        return _metadata(_IndexReader().read(data), len(data))
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise CheckpointError(f"the checkpoint's index {path} is damaged, or not one: {plain(str(exc))}") from None


class _IndexReader(PickleReader):
    """Reads indexes. Keys are strings or records, which cannot be made to take long to hash, or hash like others."""

    def __init__(self) -> None:
        super().__init__("an index", _RECORDS | _DTYPES.keys() | {_MEMBER})

    def new_dict(self) -> Any:
        return {}

    def put_items(self, target: Any, items: list[Any]) -> None:
        if not all(isinstance(key, (str, Record)) for key in items[::2]):
            raise ValueError("it has a key that is neither a string nor a record")
        _dict(target).update(zip(items[::2], items[1::2], strict=True))

    def make(self, name: str, made_of: tuple[Any, ...]) -> Any:
        if name == _MEMBER:
            of, member = made_of
            if not isinstance(of, Name) or of.text not in _RECORDS:
                raise ValueError("it takes a part of what is no enumeration")
            return Record(of.text, (text(member),))
        if name == "torch.Size":
            (numbers,) = made_of
            if not isinstance(numbers, (list, tuple)) or len(numbers) > _DIMENSIONS:
                raise ValueError(f"it has a size that is no list of up to {_DIMENSIONS} numbers")
            return torch.Size([number(each) for each in numbers])
        if name == "collections.OrderedDict":
            return {}
        return Record(name, made_of)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("it puts items into what is no dict")
    return value


# -- torch's classes, made from what was read -----------------------------------------------------------------


def _metadata(value: Any, length: int) -> Metadata:
    """The index that a pickle of `length` bytes describes."""
    has = _of(value, "metadata.Metadata")
    described = _dict(has["state_dict_metadata"])
    if sum(len(_chunks(each)) for each in described.values()) > length:  # one list may stand in many places
        raise ValueError("it has more parts of tensors than it has bytes")
    tensors: dict[str, Any] = {text(name): _storage_type(each) for name, each in described.items()}
    storage = {_index(key): _info(info) for key, info in _dict(has["storage_data"]).items()}
    for index in storage:
        if index.fqn not in tensors:
            raise ValueError(f"it has a place for {index.fqn}, but no description")
    for name, each in tensors.items():
        _check_places(name, each, storage)
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _check_places(name: str, described: Any, storage: dict[MetadataIndex, _StorageInfo]) -> None:
    """ValueError where a part of a value is nowhere, has fewer bytes than elements need, or is there twice."""
    if isinstance(described, BytesStorageMetadata):
        if MetadataIndex(name) not in storage:
            raise ValueError(f"it has no place for {name}")
        return
    for part in described.chunks:
        if 0 in part.sizes:
            continue
        place = storage.get(MetadataIndex(name, part.offsets))
        if place is None:
            raise ValueError(f"it has no place for the part of {name} at {tuple(part.offsets)}")
        if place.length < math.prod(part.sizes) * described.properties.dtype.itemsize:
            raise ValueError(f"it gives a part of {name} fewer bytes than its elements need")
    try:
        check_cover(described.size, [(part.offsets, part.sizes) for part in described.chunks])
    except ValueError as exc:
        raise ValueError(f"{name} is not whole: {exc}") from exc


def _of(value: Any, name: str) -> dict[str, Any]:
    """The attributes of a record of a class."""
    if not _is(value, name):
        raise ValueError(f"there is something else than a {name}")
    return _dict(value.has if value.has is not None else {})


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.name == f"{_HOME}{name}"


def _chunks(value: Any) -> list[Any]:
    if _is(value, "metadata.BytesStorageMetadata"):
        return []
    return as_list(_of(value, "metadata.TensorStorageMetadata")["chunks"])


def _storage_type(value: Any) -> Any:
    if _is(value, "metadata.BytesStorageMetadata"):
        return BytesStorageMetadata()
    has = _of(value, "metadata.TensorStorageMetadata")
    properties, size = has["properties"], _size(has["size"])
    if not _is(properties, "metadata.TensorProperties"):
        raise ValueError("a tensor has no properties")
    dtype = properties.has[0]
    if not isinstance(dtype, Name) or dtype.text not in _DTYPES:
        raise ValueError("a tensor has no type")
    chunks = []
    for chunk in _chunks(value):
        of = _of(chunk, "metadata.ChunkStorageMetadata")
        starts, counts = _size(of["offsets"]), _size(of["sizes"])
        if not len(starts) == len(counts) == len(size):
            raise ValueError("a part of a tensor has another number of dimensions")
        if 0 not in counts and any(n + more > whole for n, more, whole in zip(starts, counts, size, strict=True)):
            raise ValueError("a part of a tensor is not inside of it")
        chunks.append(ChunkStorageMetadata(starts, counts))
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype.text]), size, chunks)


def _index(value: Any) -> MetadataIndex:
    has = _of(value, "metadata.MetadataIndex")
    offset = has.get("offset")
    return MetadataIndex(text(has["fqn"]), None if offset is None else _size(offset))


def _info(value: Any) -> _StorageInfo:
    has = _of(value, "filesystem._StorageInfo")
    path = text(has["relative_path"])
    if len(path) > _PATH:
        raise ValueError(f"it has a path of {len(path)} characters")
    if not is_plain_name(path):
        raise ValueError(f"it points out of its folder, to {path!r}")
    if has.get("transform_descriptors"):
        raise ValueError("its tensors are stored in a transformed way, which is not supported")
    return _StorageInfo(path, number(has["offset"]), number(has["length"]))


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise ValueError("there is something else than a size")
    return value
