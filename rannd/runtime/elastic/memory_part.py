"""This rank's part of a step, written to a file in memory in the format of a checkpoint's files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from rannd.errors import CheckpointError
from rannd.ranks import memory_files
from rannd.ranks.memory_files import FIRST, KeptPart
from rannd.runtime.checkpoint.assembling import Written
from rannd.runtime.checkpoint.content import MODEL, Content
from rannd.runtime.checkpoint.outline import Subject, outline
from rannd.runtime.checkpoint.rescue import PART, SaidPart, encode_part
from rannd.runtime.comm.world import World
from rannd.runtime.storage.dcp_files import shard_name, write_values

_BUFFER = 1 << 20


def part_of(world: World, subject: Subject, step: int, extra: dict[str, Any]) -> tuple[Content, bytes]:
    """What this rank would write into a checkpoint, and its outline. Not collective.

    UsageError for what cannot be saved.
    """
    content = Content()
    return content, outline(world, subject, content, MODEL, step, extra)


def bytes_of(content: Content) -> int:
    """Bytes of the tensors of a part."""
    return sum(each.numel() * each.itemsize for each in content.values.values() if isinstance(each, torch.Tensor))


def write_part(
    file: int, world: World, content: Content, outline: bytes, *, number: int, step: int, folder: str
) -> None:
    """Write a part to the file in memory `file`; what was there before is lost from the beginning on.

    OSError or RuntimeError (torch's) where there is no memory for it; RankFailedError if a rank has failed meanwhile.
    """
    memory_files.spoil(file)
    name = shard_name(world.rank)
    with _without_checksums(), open(file, "r+b", buffering=_BUFFER, closefd=False) as opened:
        opened.seek(FIRST)
        entries = write_values(opened, name, content.values, content.aliases, content.parts)
        opened.flush()
        shard = opened.tell() - FIRST
        written = Written("", entries, {}, {name: list(path) for name, path in content.paths.items()})
        said = encode_part(SaidPart(step, world.size, outline, written))
        opened.write(said)
        opened.flush()
        os.ftruncate(file, opened.tell())
    world.watch.ensure_intact()  # reads of a device whose transfers were broken off end like any others
    names, lengths = [PART.format(world.rank)], [len(said)]
    if content.values:
        names, lengths = [name, *names], [shard, *lengths]
    try:
        prefix = KeptPart(number, step, world.rank, world.size, folder, names, lengths).prefix()
    except memory_files.RecordError as exc:
        raise CheckpointError(f"the state cannot be kept in memory: {exc}") from exc
    os.pwrite(file, prefix, 0)
    memory_files.set_whole(file, 0)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Let torch.save leave out the checksums of its archives: they take two thirds of its time.

    The watcher computes one of all if it writes the part. torch.load and rannd do not look at those inside.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
