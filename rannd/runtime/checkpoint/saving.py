"""Write a checkpoint: every rank its own part, into a folder that takes its place when all is on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rannd.errors import CheckpointError, RanndError, UsageError, text_of
from rannd.ranks import rank_notes
from rannd.runtime.checkpoint.assembling import Written, complete
from rannd.runtime.checkpoint.async_save import PendingSave, start
from rannd.runtime.checkpoint.content import Content
from rannd.runtime.checkpoint.manifest import MANIFEST, manifest
from rannd.runtime.checkpoint.outline import Subject, outline, script_of
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World
from rannd.runtime.failure import late_error
from rannd.runtime.failure.position import SAVING
from rannd.runtime.storage.atomic_folder import TOKEN, Draft, UnsyncedError
from rannd.runtime.storage.dcp_files import write_shard
from rannd.runtime.storage.sealing import unseal


def save(
    world: World,
    path: str | os.PathLike[str],
    subject: Subject,
    *,
    prefix: str,
    step: int | None,
    extra: Any,
    asynchronous: bool,
    asks: bool = False,
) -> PendingSave | None:
    """Write a checkpoint. Collective; with `asynchronous` only until this rank's values are copied.

    `asks`: whoever calls this asks for the error of an asynchronous save.
    """
    late_error.settle()
    meet(world, Phase.SAVE_CHECKPOINT)
    content, told_here, script = Content(), b"", b""
    with _agreed(world, UsageError):
        told_here = outline(world, subject, content, prefix, step, extra)
    outlines = world.gather_bytes(told_here)
    with _agreed(world, UsageError):
        if world.rank == 0:
            script = script_of([unseal(each) for each in outlines], step)
    other = world
    if asynchronous:  # while all ranks can agree on an error, and before there is a draft that would be left
        with _agreed(world, CheckpointError):
            content.snapshot()
        other = world.beside(SAVING)
    draft, folder = _draft(world, path)
    told = manifest(prefix, world.size, step, {})

    def write(among: World) -> None:
        _write(among, draft, folder, content, script, told)
        if step is not None and step >= 0 and world.rank == 0:
            rank_notes.tell(**{rank_notes.SAVED: step})

    if not asynchronous:
        write(world)
        return None

    def write_beside() -> None:
        with world.watch.beside(SAVING):
            write(other)

    return start(write_beside, os.fspath(path), tells=world.rank == 0 and not asks, asks=asks)


@contextlib.contextmanager
def _agreed(world: World, raised: type[CheckpointError | UsageError]) -> Iterator[None]:
    """A block that may fail on this rank alone, if only for a `state_dict` of the script's: then all ranks raise."""
    wrong: Exception | None = None
    try:
        yield
    except Exception as exc:
        wrong = exc
    error = "" if wrong is None else text_of(wrong)
    if wrong is not None and not isinstance(wrong, RanndError):
        error = f"the checkpoint cannot be made: {type(wrong).__name__}: {error}"
    try:
        agree_on_errors(world, error.encode(errors="backslashreplace").decode(), raised)
    except raised as exc:
        raise exc from wrong


def _draft(world: World, path: str | os.PathLike[str]) -> tuple[Draft | None, Path]:
    """The draft on rank 0, and its folder on all ranks, which they have seen. Collective."""
    draft: Draft | None = None
    error, said = "", ("", "")
    if world.rank == 0:
        try:
            draft = Draft(Path(os.path.abspath(Path(path).expanduser())), MANIFEST)
            said = (str(draft.folder), draft.token)
        except OSError as exc:
            error = f"no checkpoint can be written to {path}: {exc.strerror or exc}"
    agree_on_errors(world, error, CheckpointError)
    name, token = msgspec.msgpack.decode(world.broadcast_bytes(msgspec.msgpack.encode(said)), type=tuple[str, str])
    folder = Path(name)
    try:
        if (folder / TOKEN).read_text() != token:
            error = "finds another folder there"
    except OSError as exc:
        error = f"does not see it ({exc.strerror})"
    if error:
        error = (
            f"rank {world.rank} on {world.hosts[world.rank]} {error}: rank 0 on {world.hosts[0]} writes the checkpoint "
            f"to {folder}; name a folder on a file system that all nodes share"
        )
    try:
        agree_on_errors(world, error, CheckpointError)
    except CheckpointError:
        if draft is not None:
            draft.drop()
        raise
    return draft, folder


def _write(world: World, draft: Draft | None, folder: Path, content: Content, script: bytes, told: Any) -> None:
    """Write this rank's part; when all have, rank 0 writes the index and puts the draft in its place. Collective."""
    mine = Written("", [], {}, {name: list(path) for name, path in content.paths.items()})
    try:
        mine.entries, mine.files = write_shard(folder, world.rank, content.values, content.aliases, content.parts)
    except Exception as exc:  # torch raises errors of its own where a disk is full
        mine.error = _reason(exc, world)
    content.values.clear()
    parts = [msgspec.msgpack.decode(data, type=Written) for data in world.gather_bytes(msgspec.msgpack.encode(mine))]
    error, unsynced = next((part.error for part in parts if part.error), ""), ""

    def finish() -> None:
        assert draft is not None
        for rank, part in enumerate(parts):
            for name, each in part.files.items():
                if not (folder / name).exists() or (folder / name).stat().st_size != each.bytes:
                    raise CheckpointError(
                        f"rank 0 does not see {name}, which rank {rank} on {world.hosts[rank]} wrote to {folder}; name "
                        "a folder on a file system that all nodes share"
                    )
        complete(folder, parts, script, told)
        draft.finish()

    if world.rank == 0:
        try:
            if not error:
                finish()
        except UnsyncedError as exc:
            unsynced = _reason(exc, world)
            error = (
                f"the checkpoint is complete and in its place, but a power failure could undo that: {unsynced}: "
                f"{exc.filename} cannot be written to disk; check this disk, and save again"
            )
        except Exception as exc:
            error = _reason(exc, world)
        if error and not unsynced:
            assert draft is not None
            draft.drop()
            error = f"the checkpoint {draft.place} was not written, the one before is as it was: {error}"
    error = world.broadcast_bytes(error.encode(errors="backslashreplace")).decode()
    if error:
        raise CheckpointError(error)


def _reason(error: Exception, world: World) -> str:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    cause = error.__context__
    if isinstance(cause, OSError) and not isinstance(error, OSError):  # torch hides what the system said
        text = f"{cause.strerror or cause}; {text}"
    return f"rank {world.rank} on {world.hosts[world.rank]}: {text or type(error).__name__}"
