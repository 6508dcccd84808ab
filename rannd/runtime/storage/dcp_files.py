"""Tensors into the files of torch.distributed.checkpoint, without its pickled messages between ranks.

Each rank writes one file, ``__RANK_0.distcp``, as torch's own FileSystemWriter does; rank 0 writes the index for all.
torch.distributed.checkpoint reads such a folder as one of its own. A tensor is written once; further names of it are
further entries of the index, for the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from rannd.device.reads import read
from rannd.runtime.storage.atomic_folder import METADATA
from rannd.runtime.storage.checkpoint_file import FileFacts, facts


class PartOf(msgspec.Struct, frozen=True):
    """Which box of a tensor something is."""

    name: str
    offsets: list[int]
    shape: list[int]
    """Of the whole tensor."""


class Entry(msgspec.Struct, frozen=True):
    """Where a value, or a part of a tensor, lies. `dtype` and `shape` are a tensor's; other values have no dtype."""

    name: str
    aliases: list[str]
    dtype: str
    shape: list[int]
    file: str
    offset: int
    length: int
    part: PartOf | None = None


def write_shard(
    folder: Path,
    rank: int,
    values: Mapping[str, Any],
    aliases: Mapping[str, Sequence[str]],
    parts: Mapping[str, PartOf] = MappingProxyType({}),
) -> tuple[list[Entry], dict[str, FileFacts]]:
    """Write a rank's tensors, and other values, to its file, on disk when this returns; nothing where it has none.

    `parts`: values that are parts of tensors.
    """
    if not values:
        return [], {}
    path = folder / shard_name(rank)
    with path.open("wb") as file:
        entries = write_values(file, path.name, values, aliases, parts)
        file.flush()
        os.fsync(file.fileno())
    return entries, {path.name: facts(path)}


def shard_name(rank: int) -> str:
    """Name of a rank's file, torch's."""
    return f"__{rank}_0.distcp"


def write_values(
    file: BinaryIO,
    name: str,
    values: Mapping[str, Any],
    aliases: Mapping[str, Sequence[str]],
    parts: Mapping[str, PartOf] = MappingProxyType({}),
) -> list[Entry]:
    """Write values one after the other as torch's FileSystemWriter does, from the present place of a buffered file.

    Tensors come last.

    Args:
        file: Where to.
        name: What the index calls it.
        values, aliases, parts: As of `write_shard`.

    Returns:
        What the index says of them, with offsets from the first one's beginning.
    """
    entries, begin = [], file.tell()
    for key, value in sorted(values.items(), key=lambda item: isinstance(item[1], torch.Tensor)):
        offset, part = file.tell(), parts.get(key)
        tensor = isinstance(value, torch.Tensor)
        torch.save(_alone(value) if tensor else value, file)
        entries.append(
            Entry(
                key if part is None else part.name,
                list(aliases.get(key if part is None else part.name, ())),
                str(value.dtype).removeprefix("torch.") if tensor else "",
                list(value.shape) if tensor else [],
                name,
                offset - begin,
                file.tell() - offset,
                part,
            )
        )
    return entries


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU with a storage of its own: torch.save writes whole storages."""
    value = read(tensor)
    return value.clone() if value.untyped_storage().nbytes() != value.numel() * value.itemsize else value


def write_index(folder: Path, entries: Sequence[Entry], paths: Mapping[str, Sequence[Any]]) -> None:
    """Write the index of all ranks' entries. `paths`: where in a nested dict the values belong, for plain readers."""
    described: dict[str, Any] = {}
    results = []
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            size, part = torch.Size(entry.shape), entry.part
            begin = torch.Size([0] * len(size) if part is None else part.offsets)
            if entry.dtype:
                properties = TensorProperties(dtype=getattr(torch, entry.dtype))
                whole = size if part is None else torch.Size(part.shape)
                about = described.setdefault(name, TensorStorageMetadata(properties, whole, []))
                about.chunks.append(ChunkStorageMetadata(begin, size))
            else:
                described[name] = BytesStorageMetadata()
            index = MetadataIndex(name, begin if entry.dtype else None)
            results.append(WriteResult(index, entry.length, _StorageInfo(entry.file, entry.offset, entry.length)))
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    planned = {name: tuple(paths.get(name, (name,))) for name in described}
    writer.finish(Metadata(described, planner_data=planned), [results])
    _sync(folder / METADATA)


def _sync(path: Path) -> None:
    """Write a file to disk. (torch's `sync_files` syncs before Python has written all that it buffers.)"""
    with path.open("rb") as file:
        os.fsync(file.fileno())
