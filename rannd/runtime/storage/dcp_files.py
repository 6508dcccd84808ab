"""Tensors into the files of torch.distributed.checkpoint, without its pickled messages between ranks.

Each rank writes one file, ``__RANK_0.distcp``, with torch's own FileSystemWriter; rank 0 writes the index for all.
torch.distributed.checkpoint reads such a folder as one of its own. A tensor is written once; further names of it are
further entries of the index, for the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

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
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
    writer.set_up_storage_writer(False)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(values), None, False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = [*(SavePlan([]) for _ in range(rank)), plan]
    written = writer.write_data(writer.prepare_global_plan(plans)[rank], planner).value()
    entries = []
    for result in written:
        key, info = result.index.fqn, result.storage_data
        value, part = values[key], parts.get(key)
        name = key if part is None else part.name
        tensor = isinstance(value, torch.Tensor)
        entries.append(
            Entry(
                name,
                list(aliases.get(name, ())),
                str(value.dtype).removeprefix("torch.") if tensor else "",
                list(value.shape) if tensor else [],
                info.relative_path,
                info.offset,
                info.length,
                part,
            )
        )
    files = {entry.file for entry in entries}
    for name in files:
        _sync(folder / name)
    return entries, {name: facts(folder / name) for name in sorted(files)}


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
