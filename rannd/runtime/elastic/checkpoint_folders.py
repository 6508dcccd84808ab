"""The checkpoints of one training: folders ``step-00000120`` in a directory."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from rannd.runtime.checkpoint.manifest import MANIFEST
from rannd.runtime.storage.atomic_folder import GONE, remove

_NAME = re.compile("step-([0-9]{8,18})")


def folder_of(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def saved_steps(directory: Path, told: int | None = None) -> list[int]:
    """Steps of which there are checkpoints, the newest first. OSError where the directory cannot be read.

    `told`: a step that is known of. NFS may list the directory as it was half a minute ago.
    """
    try:
        names = {each.name for each in directory.iterdir()}
    except FileNotFoundError:
        names = set()
    if told is not None:
        names.add(folder_of(directory, told).name)
    whole = [name for name in names if _NAME.fullmatch(name) and (directory / name / MANIFEST).is_file()]
    return sorted((int(name.removeprefix("step-")) for name in whole), reverse=True)


def prune(directory: Path, newest: int, kept: int) -> None:
    """Remove all but `kept` of those up to the `newest` whole one; what cannot be removed stays until the next time.

    Later ones were left out when the training went on: they are damaged.
    """
    with contextlib.suppress(OSError):
        for step in [step for step in saved_steps(directory) if step <= newest][kept:]:
            with contextlib.suppress(OSError):
                folder = folder_of(directory, step)
                gone = directory / f".{folder.name}{GONE}{secrets.token_hex(8)}"
                os.rename(folder, gone)  # first: half of it would look like a checkpoint
                remove(gone)
