"""The last step of writing a checkpoint: index, script and manifest for the files that the ranks have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rannd.runtime.checkpoint.manifest import MANIFEST, Manifest
from rannd.runtime.checkpoint.script_state import SCRIPT
from rannd.runtime.storage.atomic_folder import METADATA, write_file
from rannd.runtime.storage.checkpoint_file import FileFacts, facts
from rannd.runtime.storage.dcp_files import Entry, write_index


class Written(msgspec.Struct):
    """What one rank has written."""

    error: str
    """Why it could not write."""
    entries: list[Entry]
    files: dict[str, FileFacts]
    paths: dict[str, list[Any]]
    """Where values belong in nested dicts, for plain readers."""


def complete(folder: Path, parts: Sequence[Written], script: bytes, told: Manifest) -> None:
    """Write into the folder what belongs to the ranks' files; `told`: the manifest, which has no files yet.

    OSError where the disk is full.
    """
    entries = [entry for part in parts for entry in part.entries]
    write_index(folder, entries, {name: path for part in parts for name, path in part.paths.items()})
    write_file(folder / SCRIPT, script)
    files = {name: each for part in parts for name, each in part.files.items()}
    files |= {name: facts(folder / name) for name in (METADATA, SCRIPT)}
    write_file(folder / MANIFEST, msgspec.structs.replace(told, files=files).sealed())
