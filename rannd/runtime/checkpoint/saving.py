"""Write a checkpoint: every rank its own part, into a folder that takes its place when all is on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn

from rannd.errors import CheckpointError, RanndError, UsageError, text_of
from rannd.ranks import rank_notes
from rannd.runtime.averaged_model import AveragedModel
from rannd.runtime.checkpoint.async_save import PendingSave, start
from rannd.runtime.checkpoint.content import Content, class_name, put_averages, put_model, put_optimizer
from rannd.runtime.checkpoint.manifest import MANIFEST, check_plain, manifest
from rannd.runtime.checkpoint.rng_state import random_state
from rannd.runtime.checkpoint.script_state import LARGEST, SCRIPT
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.rendezvous import make_group
from rannd.runtime.comm.world import World
from rannd.runtime.failure import late_error
from rannd.runtime.failure.position import SAVING
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.state_codec import NamedState, merge
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.storage.atomic_folder import TOKEN, Draft, UnsyncedError, write_file
from rannd.runtime.storage.checkpoint_file import FileFacts, facts
from rannd.runtime.storage.dcp_files import Entry, write_index, write_shard
from rannd.runtime.storage.sealing import seal, unseal

_storage: dict[int, dist.ProcessGroup | None] = {}
"""For each world's control group, another one for the thread that saves."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a checkpoint is of."""

    model: nn.Module
    parameters: Parameters | None
    """Who holds what; None where every rank has the whole model."""
    position: tuple[int, int]
    """Seed and number of calls of the model's random operators."""
    optimizer: WholeOptimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    values: InitialValues | None = None
    """Of a model that waits for its values (meta device): what is loaded is read when it is deployed."""
    averaged: AveragedModel | None = None

    def check(self) -> None:
        """UsageError for what cannot be saved or loaded."""
        if self.optimizer is not None and (self.parameters is not None or self.values is not None):
            whole = self.optimizer
            if not whole.attached or (self.parameters is not None and self.parameters not in whole.members):
                raise UsageError(
                    "the optimizer was not given to RaNNCModule, so that nobody knows which rank has which part of its "
                    "state; wrap the model with RaNNCModule(model, optimizer)"
                )
            wrong = whole.check_groups()
            if wrong:
                raise UsageError(wrong)
        for name in ("scheduler", "scaler"):
            each = getattr(self, name)
            if each is not None and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(f"{name} is a {type(each).__qualname__}, which has no state_dict and load_state_dict")


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
    content, outline, script = Content(), b"", b""
    with _agreed(world, UsageError):
        outline = _outline(world, subject, content, prefix, step, extra)
    outlines = world.gather_bytes(outline)
    with _agreed(world, UsageError):
        if world.rank == 0:
            script = _script([unseal(each) for each in outlines], step, extra)
    other = world
    if asynchronous:  # while all ranks can agree on an error, and before there is a draft that would be left
        with _agreed(world, CheckpointError):
            content.snapshot()
        other = _storage_world(world)
    draft, folder = _draft(world, path)
    told = manifest(prefix, world.size, step, {})

    def write(among: World) -> None:
        _write(among, draft, folder, content, script, told)
        if step is not None and step >= 0:
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


def _outline(world: World, subject: Subject, content: Content, prefix: str, step: int | None, extra: Any) -> bytes:
    """Fill the content, and tell all the rest of this rank."""
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise UsageError(f"step is {step!r}; a whole number is wanted")
    wrong = check_plain(extra, "extra")
    if wrong:
        raise UsageError(wrong)
    subject.check()
    put_model(content, world, subject.parameters, subject.model, prefix)
    if subject.averaged is not None:
        put_averages(content, world, subject.parameters, subject.averaged)
    said: dict[str, Any] = {"rng": random_state(world.device), "position": subject.position}
    if subject.optimizer is not None:
        said["optimizer"] = vars(put_optimizer(content, subject.optimizer, subject.model))
        said["class"] = class_name(subject.optimizer.optimizer)
    if subject.averaged is not None:
        said["averaged"] = subject.averaged.n_averaged
    if world.rank == 0:
        for name in ("scheduler", "scaler"):
            each = getattr(subject, name)
            if each is not None:
                said[name] = each.state_dict()
                seal(said[name], f"the state of {name}")
    return seal(said, "the state of the script")


def _script(told: list[dict[str, Any]], step: int | None, extra: Any) -> bytes:
    """The file of the script's state, of what the ranks have told."""
    first = told[0]
    script: dict[str, Any] = {
        "step": step,
        "extra": extra,
        "rng": [each["rng"] for each in told],
        "position": first["position"],
        "scheduler": first.get("scheduler"),
        "scaler": first.get("scaler"),
        "optimizer": None,
    }
    if "averaged" in first:
        script["averaged"] = first["averaged"]
    if "optimizer" in first:
        parts = [NamedState[str](**each["optimizer"]) for each in told]
        script["optimizer"] = {"class": first["class"], **vars(merge(parts))}
        del script["optimizer"]["pieces"]
    data = seal(script, "the state of the script")
    if len(data) > LARGEST:
        raise UsageError(
            f"step, extra, scheduler, scaler and settings have {len(data)} bytes, more than {LARGEST}; what is large "
            "belongs into the model or the optimizer's state of parameters, or into a file of its own"
        )
    return data


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


class _Written(msgspec.Struct):
    error: str
    entries: list[Entry]
    files: dict[str, FileFacts]
    paths: dict[str, list[Any]]


def _write(world: World, draft: Draft | None, folder: Path, content: Content, script: bytes, told: Any) -> None:
    """Write this rank's part; when all have, rank 0 writes the index and puts the draft in its place. Collective."""
    mine = _Written("", [], {}, {name: list(path) for name, path in content.paths.items()})
    try:
        mine.entries, mine.files = write_shard(folder, world.rank, content.values, content.aliases, content.parts)
    except Exception as exc:  # torch raises errors of its own where a disk is full
        mine.error = _reason(exc, world)
    content.values.clear()
    parts = [msgspec.msgpack.decode(data, type=_Written) for data in world.gather_bytes(msgspec.msgpack.encode(mine))]
    error, unsynced = next((part.error for part in parts if part.error), ""), ""

    def finish() -> None:
        assert draft is not None
        files = {name: each for part in parts for name, each in part.files.items()}
        for rank, part in enumerate(parts):
            for name, each in part.files.items():
                if not (folder / name).exists() or (folder / name).stat().st_size != each.bytes:
                    raise CheckpointError(
                        f"rank 0 does not see {name}, which rank {rank} on {world.hosts[rank]} wrote to {folder}; name "
                        "a folder on a file system that all nodes share"
                    )
        entries = [entry for part in parts for entry in part.entries]
        write_index(folder, entries, {name: path for part in parts for name, path in part.paths.items()})
        write_file(folder / SCRIPT, script)
        files |= {name: facts(folder / name) for name in (".metadata", SCRIPT)}
        write_file(folder / MANIFEST, msgspec.structs.replace(told, files=files).sealed())
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


def _storage_world(world: World) -> World:
    """The same ranks with another group for messages, which a thread may use beside the script. Collective when new."""
    if world.size == 1:
        return world
    if id(world.control) not in _storage:
        with world.watch.inside("group"):
            _storage[id(world.control)] = make_group(world.watch.connections, "gloo")
    return dataclasses.replace(world, control=_storage[id(world.control)])
