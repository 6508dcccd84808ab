"""Reads the tensors and other values in a folder of torch.distributed.checkpoint, as data.

First everything is looked at but the elements of tensors; so what is damaged is told before a tensor has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from rannd.daemon.common.printable import plain
from rannd.errors import CheckpointError
from rannd.runtime.storage.checkpoint_file import opened
from rannd.runtime.storage.saved_value import StoredTensor, find_tensor, read_value


@dataclass(frozen=True)
class IndexedFolder:
    """A folder of torch.distributed.checkpoint with its index."""

    path: Path
    index: Metadata
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of files, by their names, where that is known."""

    def tensor(self, name: str) -> TensorStorageMetadata:
        """What the index says of a tensor. CheckpointError where it has none of this name."""
        found = self.index.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{plain(name)} is no tensor in the index of {self.path}")
        return found

    def open(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Open one of its files. CheckpointError where that cannot be, see `opened`."""
        return opened(self.path / file, exactly=self.sizes.get(file))


@dataclass
class FoundValues:
    """What has been found in a folder: tensors to be read, and other values."""

    folder: IndexedFolder
    parts: dict[str, list[tuple[torch.Tensor, StoredTensor]]]
    """By the file that it is in, each part of a tensor, and where its elements go."""
    values: dict[str, Any]

    def without(self, targets: Iterable[torch.Tensor]) -> None:
        """Leave tensors out of what is read."""
        gone = {each.untyped_storage().data_ptr() for each in targets}
        for name, parts in self.parts.items():
            self.parts[name] = [each for each in parts if each[0].untyped_storage().data_ptr() not in gone]

    def read(self) -> None:
        """Read the elements into the tensors. CheckpointError where a file can no longer be read."""
        with torch.no_grad():
            for name, parts in self.parts.items():
                with self.folder.open(name) as file:
                    for target, stored in parts:
                        target.copy_(stored.read(file))


def find(folder: IndexedFolder, targets: Mapping[str, torch.Tensor], values: Iterable[str] = ()) -> FoundValues:
    """Look for tensors and other values.

    Args:
        folder: Where to look.
        targets: Tensors to be read into, each with the size that it has in the index, by their names there.
        values: Names of what are no tensors.

    Raises:
        CheckpointError: A file is not there, or damaged, or something in it is not what the index says.
    """
    wanted: dict[str, list[tuple[_StorageInfo, str, torch.Tensor | None]]] = {}
    places = folder.index.storage_data
    for name, whole in targets.items():
        for part in folder.tensor(name).chunks:
            if 0 not in part.sizes:
                box = tuple(slice(start, start + count) for start, count in zip(part.offsets, part.sizes, strict=True))
                place = places[MetadataIndex(name, part.offsets)]
                wanted.setdefault(place.relative_path, []).append((place, name, whole[box]))
    for name in values:
        place = places[MetadataIndex(name)]
        wanted.setdefault(place.relative_path, []).append((place, name, None))
    found = FoundValues(folder, {}, {})
    left = 0
    for file, items in wanted.items():
        with folder.open(file) as opened_file:
            size = opened_file.seek(0, 2)
            left += size
            parts = found.parts[file] = []
            for place, name, target in items:
                try:
                    if place.offset + place.length > size:
                        raise ValueError(f"it ends at {place.offset + place.length}, the file at {size}")
                    if target is None:
                        found.values[name] = read_value(opened_file, place.offset, place.length)
                        continue
                    stored = find_tensor(opened_file, place.offset, place.length)
                    if stored.size != tuple(target.shape):
                        raise ValueError(f"it is {stored.size} there, and {tuple(target.shape)} in the index")
                except ValueError as exc:
                    raise CheckpointError(plain(f"{name} in {folder.path / file} is damaged: {exc}")) from None
                left -= stored.storage.count
                parts.append((target, stored))
    if left < 0:
        raise CheckpointError(f"tensors of {folder.path} lie one over the other in their files; it is damaged")
    return found


class Distributed:
    """The tensors of a folder that torch.distributed.checkpoint, or `pyrannc.save_checkpoint`, wrote."""

    def __init__(self, folder: IndexedFolder) -> None:
        self.where = str(folder.path)
        self._folder = folder
        self.shapes = {
            name: tuple(each.size)
            for name, each in folder.index.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def read(self, name: str) -> torch.Tensor:
        """As of any Weights; only the parts of the files that belong to the tensor are read."""
        about = self._folder.tensor(name)
        try:
            made = torch.empty(about.size, dtype=about.properties.dtype)
            find(self._folder, {name: made}).read()
        except (CheckpointError, RuntimeError) as exc:  # torch: there is not so much memory
            raise CheckpointError(f"{plain(name)} cannot be read from {self.where}: {exc}") from exc
        return made
