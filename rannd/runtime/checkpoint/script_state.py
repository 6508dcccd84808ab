"""What ``script.pt`` holds: the script's own state, and what is known of the optimizer beside its tensors.

torch.save writes it, and ``torch.load`` with weights_only=True can read it; rannd reads it as data (saved_value.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from rannd.errors import CheckpointError
from rannd.runtime.optim.state_codec import NamedState
from rannd.runtime.storage.checkpoint_file import FileFacts, checked
from rannd.runtime.storage.saved_value import read_value

SCRIPT = "script.pt"
LARGEST = 1 << 30
"""Bytes of the file."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SavedGroup(msgspec.Struct, frozen=True):
    """What every group of an optimizer has."""

    params: list[str]


class SavedOptimizer(msgspec.Struct, frozen=True):
    """The fields of `NamedState`, and the name of the optimizer's class."""

    class_name: str = msgspec.field(name="class")
    groups: list[dict[str, Any]]
    states: dict[str, Any]
    other: dict[Any, Any]
    extra: dict[str, Any]

    @property
    def skeleton(self) -> NamedState[str]:
        """The state in which tensors are missing."""
        return NamedState(self.groups, self.states, self.other, self.extra)


class ScriptState(msgspec.Struct, frozen=True):
    """The content of the file."""

    step: int | None
    extra: Any
    rng: list[dict[str, Any]]
    """Random numbers of each rank, see rng_state.py."""
    position: tuple[int, _Count]
    """Seed and number of calls of the model's random operators."""
    scheduler: Any
    scaler: Any
    optimizer: SavedOptimizer | None
    averaged: _Count | None = None
    """How many models the averages are of."""

    def __post_init__(self) -> None:
        if not 0 <= self.position[0] < 1 << 64:
            raise ValueError("the seed is no number of 64 bits")


def read_script(folder: Path, wanted: FileFacts) -> ScriptState:
    """Read the file. CheckpointError where it is damaged, or holds something else; `wanted`: what was written."""
    path = folder / SCRIPT
    with checked(path, LARGEST, wanted) as file:
        try:
            found = msgspec.convert(read_value(file, 0, wanted.bytes), ScriptState)
            for group in found.optimizer.groups if found.optimizer is not None else ():
                msgspec.convert(group, SavedGroup)
        except (ValueError, msgspec.ValidationError) as exc:
            raise CheckpointError(f"{path} cannot be read: it is damaged: {exc}. Nothing was loaded") from exc
    return found
