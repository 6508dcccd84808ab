"""A checkpoint of the parts that were kept in memory, and that watchers have written after a failure.

The folder ``step-00000012.rescued-HEX`` beside the checkpoints has, of each rank, the file with its tensors as it would
be in a checkpoint, ``part-RANK.msgpack`` with what is said of it (`SaidPart`), and ``part-RANK.json``, written last,
with sizes and checksums of both (rannd/runner/watch/kept_memory.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from rannd import log
from rannd.daemon.common.printable import plain
from rannd.errors import CheckpointError, RanndError
from rannd.ranks.memory_files import MOST_RANKS, RESCUED
from rannd.runtime.checkpoint.assembling import Written, complete
from rannd.runtime.checkpoint.content import MODEL
from rannd.runtime.checkpoint.manifest import MANIFEST, manifest
from rannd.runtime.checkpoint.outline import script_of
from rannd.runtime.storage.atomic_folder import Draft, UnsyncedError
from rannd.runtime.storage.checkpoint_file import FileFacts, checked, is_plain_name, opened
from rannd.runtime.storage.sealing import unseal

PART, FACTS = "part-{}.msgpack", "part-{}.json"
_NAME = re.compile(f"step-([0-9]{{8,18}}){re.escape(RESCUED)}[0-9a-f]+")
_LARGEST_PART, _LARGEST_FACTS = 1 << 30, 1 << 16


class SaidPart(msgspec.Struct, frozen=True):
    """What a rank says of its part of a step."""

    step: int
    size: int
    """Number of ranks."""
    outline: bytes
    written: Written


def encode_part(part: SaidPart) -> bytes:
    """As the bytes of its file."""
    return msgspec.msgpack.encode(part)


def rescued(directory: Path, told: str = "") -> list[tuple[int, Path]]:
    """Steps of which parts were written after a failure, and their folders; the newest first.

    `told`: a folder that is known of. NFS may list the directory as it was half a minute ago.

    OSError where the directory cannot be read.
    """
    try:
        names = {each.name for each in directory.iterdir()}
    except FileNotFoundError:
        names = set()
    name = os.path.basename(told)
    if told == str(directory / name) and os.path.isdir(told):
        names.add(name)
    found = ((int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name)))
    return sorted(found, reverse=True)


def forget(directory: Path, step: int) -> None:
    """Remove what was written after failures up to a step, which is loaded; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for found, folder in rescued(directory):
            if found <= step:
                shutil.rmtree(folder, ignore_errors=True)


def make_checkpoint(folder: Path, place: Path) -> None:
    """Make a checkpoint at `place` of the parts in a folder, which keeps them.

    CheckpointError where they are not whole, or the checkpoint cannot be written.
    """
    try:
        _make(folder, place)
    except UnsyncedError as exc:
        log.get("RaNNCModule").warning("%s is there, but a power failure could undo that: %s", place, exc)
    except (OSError, RanndError) as exc:
        raise CheckpointError(f"no checkpoint can be made of {folder}: {exc}") from exc
    except Exception as exc:  # what was written by somebody else
        raise CheckpointError(plain(f"no checkpoint can be made of {folder}, which is damaged: {exc!r}")) from exc


def _make(folder: Path, place: Path) -> None:
    first, _ = _read(folder, 0)
    if not 0 < first.size <= MOST_RANKS:
        raise CheckpointError(f"{PART.format(0)} says that there are {first.size} ranks")
    parts: list[SaidPart] = []
    for rank in range(first.size):
        part, files = _read(folder, rank)
        if (part.step, part.size) != (first.step, first.size):
            raise CheckpointError(f"{PART.format(rank)} is of another step or job than {PART.format(0)}")
        part.written.files = files
        parts.append(part)
    outlines = [unseal(part.outline) for part in parts]
    script = script_of(outlines, first.step)
    draft = Draft(place, MANIFEST)
    try:
        for part in parts:
            for name in part.written.files:
                _place(folder / name, draft.folder / name)
        written = [part.written for part in parts]
        complete(draft.folder, written, script, manifest(MODEL, first.size, first.step, {}))
    except BaseException:
        draft.drop()
        raise
    draft.finish()


def _read(folder: Path, rank: int) -> tuple[SaidPart, dict[str, FileFacts]]:
    """A rank's part, and its file of tensors, if it has one."""
    path = folder / FACTS.format(rank)
    if not path.exists():
        raise CheckpointError(f"the part of rank {rank} is missing, or not whole")
    with opened(path, _LARGEST_FACTS) as file:
        files = msgspec.json.decode(file.read(), type=dict[str, FileFacts])
    name = PART.format(rank)
    if strange := [each for each in files if not is_plain_name(each)]:
        raise CheckpointError(f"{path.name} names the file {strange[0]!r}")
    with checked(folder / name, _LARGEST_PART, files.pop(name)) as file:
        return msgspec.msgpack.decode(file.read(), type=SaidPart), files


def _place(source: Path, target: Path) -> None:
    """Let a file be in the checkpoint, too: a copy of it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
