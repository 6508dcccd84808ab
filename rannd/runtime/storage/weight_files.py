"""Values of parameters in files, read one tensor at a time: safetensors, and torch.distributed.checkpoint.

Every rank reads what it holds and nothing else. Nothing that comes from a file is run (see pickle_reader.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from rannd.daemon.common.printable import plain
from rannd.errors import CheckpointError
from rannd.runtime.storage.atomic_folder import METADATA
from rannd.runtime.storage.checkpoint_file import is_plain_name

INDEX = "model.safetensors.index.json"


class Weights(Protocol):
    """Named tensors that can be read one by one."""

    where: str
    """For messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, by its name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU. CheckpointError where the file is broken."""
        ...


class Given:
    """A state in memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self.where = "the state"

    def read(self, name: str) -> torch.Tensor:
        """As of any Weights."""
        return self._state[name].detach()


class Safetensors:
    """One file of safetensors, or several with Hugging Face's index.

    Args:
        files: The file of each name, or None for all that is in it.
    """

    def __init__(self, where: Path, files: Mapping[str, Path] | None) -> None:
        from safetensors import SafetensorError, safe_open

        self.where = str(where)
        self._open: Any = safe_open
        self._broken: type[Exception] = SafetensorError
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, Path] = {}
        paths = [where] if files is None else sorted(set(files.values()))
        for path in paths:
            if not path.is_file():  # a pipe would be waited for
                raise CheckpointError(f"{path} is no file of safetensors that can be read: it is not a regular file")
            try:
                with safe_open(path, framework="pt") as held:
                    for name in held.keys():  # noqa: SIM118 (it is no mapping)
                        if files is None or files.get(name) == path:
                            self._file[name] = path
                            self.shapes[name] = tuple(held.get_slice(name).get_shape())
            except (OSError, SafetensorError) as exc:
                raise CheckpointError(f"{path} is no file of safetensors that can be read: {exc}") from exc
        missing = sorted(set(files or ()) - set(self._file))
        if missing:
            raise CheckpointError(
                f"{where / INDEX} names {plain(missing[0])}, which is not in its file; the checkpoint is broken"
            )

    def read(self, name: str) -> torch.Tensor:
        """As of any Weights. The file is mapped for this tensor alone: pages of others would count as memory."""
        try:
            with self._open(self._file[name], framework="pt") as held:
                found: torch.Tensor = held.get_tensor(name).clone()
                return found
        except (OSError, self._broken) as exc:
            raise CheckpointError(f"{name} cannot be read from {self._file[name]}: {exc}") from exc


def open_weights(path: Path) -> Weights:
    """What is at `path`: a .safetensors file, a folder of such files, or a folder of torch.distributed.checkpoint.

    CheckpointError for anything else.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return Safetensors(path, None)
    if path.is_dir():
        if (path / INDEX).is_file():
            return Safetensors(path, _index(path))
        if (path / "model.safetensors").is_file():
            return Safetensors(path / "model.safetensors", None)
        if (path / METADATA).is_file():
            # Only here: importing torch.distributed.checkpoint takes as long as a fifth of torch.
            from rannd.runtime.storage.dcp_metadata import read_index
            from rannd.runtime.storage.dcp_reading import Distributed, IndexedFolder

            return Distributed(IndexedFolder(path, read_index(path)))
    what = "is not there" if not path.exists() else "is none of them"
    raise CheckpointError(
        f"checkpoint {path} {what}: name a .safetensors file, a folder with model.safetensors or {INDEX}, or a folder "
        "that torch.distributed.checkpoint.save wrote (with .metadata), and see that every rank can read it"
    )


def _index(folder: Path) -> dict[str, Path]:
    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        found = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index).weight_map
    except (OSError, msgspec.MsgspecError) as exc:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {exc}") from exc
    for name in found.values():
        if not is_plain_name(name):
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is no file beside it")
    return {name: folder / file for name, file in found.items()}


@dataclass(frozen=True)
class Match:
    """Names in a checkpoint for the tensors of a model."""

    names: Mapping[str, str]
    """Name in the checkpoint of each tensor that it has, by the tensor's first name in the model."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(model: nn.Module, first: Mapping[str, str], weights: Weights) -> Match:
    """Find the model's tensors in a checkpoint, by the names of its state_dict; of tied ones, one name is enough.

    `first` gives the first name of the tensor behind each name of the model. Names may have a common prefix in a
    checkpoint of several states (``{"model": model.state_dict(), ...}``). What a Hugging Face model says may be
    missing or too many is so. CheckpointError for a wrong shape.
    """
    state = nn.Module.state_dict(model, keep_vars=True)
    saved = [name for name, value in state.items() if isinstance(value, torch.Tensor) and name in first]
    prefix = _prefix(saved, weights)
    names: dict[str, str] = {}
    for name in saved:
        if prefix + name in weights.shapes:
            names.setdefault(first[name], prefix + name)
    for name, there in names.items():
        shape = tuple(state[there.removeprefix(prefix)].shape)
        if weights.shapes[there] != shape:
            raise CheckpointError(
                f"{name} has shape {weights.shapes[there]} in {weights.where} and {shape} in the model; it is "
                "of another model"
            )
    known = set(saved)
    missing = [name for name in saved if first[name] not in names]
    unexpected = [name for name in weights.shapes if name.startswith(prefix) and name.removeprefix(prefix) not in known]
    return Match(
        names,
        tuple(_unless(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))),
        tuple(_unless(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))),
    )


def _prefix(saved: list[str], weights: Weights) -> str:
    """What stands before the model's names in the checkpoint."""
    if any(name in weights.shapes for name in saved):
        return ""
    ends = [name[: -len(saved[0])] for name in weights.shapes if saved and name.endswith(f".{saved[0]}")]
    counts = {prefix: sum(prefix + name in weights.shapes for name in saved) for prefix in ends}
    return max(counts, key=lambda prefix: counts[prefix], default="")


def _unless(names: list[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]
