"""Tensors of a checkpoint, read one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rannd.errors import CheckpointError
from rannd.runtime.checkpoint.shards import read_values


class Distributed:
    """The tensors of a folder that torch.distributed.checkpoint, or `pyrannc.save_checkpoint`, wrote."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        self.where = str(folder)
        self._folder = folder
        self._index = index
        self._tensors = {
            name: each for name, each in index.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(each.size) for name, each in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """As of any Weights; only the parts of the files that belong to the tensor are read."""
        each = self._tensors[name]
        made = torch.empty(each.size, dtype=each.properties.dtype)
        try:
            read_values(self._folder, self._index, {name: made})
        except Exception as exc:  # torch and pickle raise all kinds of errors for a damaged file
            raise CheckpointError(f"{name} cannot be read from {self.where}: {type(exc).__name__}: {exc}") from exc
        return made
