"""Read a checkpoint into a model under any plan: each rank what it holds, after all have found everything right."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from rannd import log
from rannd.daemon.common.printable import plain
from rannd.errors import CheckpointError, RanndError
from rannd.runtime.checkpoint.content import (
    AVERAGED,
    average_name,
    class_name,
    dotted,
    extra_states,
    parameter_names,
    state_name,
    state_tensors,
)
from rannd.runtime.checkpoint.manifest import MANIFEST, Manifest
from rannd.runtime.checkpoint.outline import Subject
from rannd.runtime.checkpoint.rng_state import check_random_state, set_random_state
from rannd.runtime.checkpoint.script_state import SCRIPT, ScriptState, read_script
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World
from rannd.runtime.failure import late_error
from rannd.runtime.optim.state_codec import TensorName
from rannd.runtime.storage.atomic_folder import METADATA, recover
from rannd.runtime.storage.checkpoint_file import checked
from rannd.runtime.storage.dcp_metadata import read_index
from rannd.runtime.storage.dcp_reading import Distributed, FoundValues, IndexedFolder, find
from rannd.runtime.zero.tensor_piece import TensorPiece


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint gives back to the script."""

    step: int | None
    extra: Any
    missing: tuple[str, ...] = ()
    """Names that the model has and the checkpoint has not (with ``strict=False``)."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the model has not (with ``strict=False``)."""


@dataclass
class _Found:
    """A checkpoint as read, and what of it goes where on this rank."""

    folder: IndexedFolder
    manifest: Manifest | None
    script: ScriptState | None
    tensors: dict[str, torch.Tensor]
    pieces: dict[str, TensorPiece]
    """Tensors of which this rank has a piece."""
    later: dict[str, str]
    """Names, in the index, of what is read when the model is deployed, by names in the model."""
    extras: dict[str, nn.Module]
    missing: list[str]
    unexpected: list[str]


def load(
    world: World, path: str | os.PathLike[str], subject: Subject, *, prefix: str | None, strict: bool, rng: bool
) -> tuple[Checkpoint, tuple[int, int] | None]:
    """Read a checkpoint; also where the model's random operators go on. Collective."""
    late_error.settle()
    meet(world, Phase.LOAD_CHECKPOINT)
    folder = Path(os.path.abspath(Path(path).expanduser()))
    if world.rank == 0:
        recover(folder)
    world.barrier()
    found: _Found | None = None
    error = ""
    try:
        found = _look(world, folder, subject, prefix, strict)
    except RanndError as exc:
        error = plain(str(exc))
    agree_on_errors(world, error, CheckpointError)
    assert found is not None
    error = _damaged(world, found)
    agree_on_errors(world, error, CheckpointError)
    local: dict[str, Any] | None = None
    averages: dict[str, torch.Tensor] = {}
    values: FoundValues | None = None
    script = found.script
    try:
        if rng and script is not None and world.rank < len(script.rng):
            check_random_state(script.rng[world.rank], world.device)
        # Pieces are read later, one whole tensor at a time; here all is only looked for, in memory that is not written.
        whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in found.pieces.items()}
        values = find(found.folder, found.tensors | whole, found.extras)
        values.without(whole.values())
        del whole
        averages = _averages(found, subject)
        # the optimizer's state is read beside the present one: that may still fail without harm
        local = _optimizer_state(found, subject, states=subject.values is None)
    except Exception as exc:  # the optimizer's class raises what it likes
        error = plain(f"{folder}: {exc}")
    agree_on_errors(world, error, CheckpointError)
    assert values is not None
    try:
        _put(found, values, subject, local)
        if subject.averaged is not None:
            assert script is not None
            assert script.averaged is not None
            subject.averaged.put(averages, script.averaged)
    except Exception as exc:
        error = plain(f"loading {folder} failed half way, do not go on with this model: {exc}")
    agree_on_errors(world, error, CheckpointError)
    missing, unexpected = tuple(found.missing), tuple(found.unexpected)
    if script is None:
        return Checkpoint(None, None, missing, unexpected), None
    if rng:
        if world.rank < len(script.rng):
            set_random_state(script.rng[world.rank], world.device)
        if len(script.rng) != world.size and world.rank == 0:
            log.get("RaNNCModule").info(
                "The checkpoint's job had %d rank(s), this one has %d: ranks that it did not have begin with random "
                "numbers of their own, the others continue theirs",
                len(script.rng),
                world.size,
            )
    return Checkpoint(script.step, script.extra, missing, unexpected), script.position if rng else None


def _look(world: World, folder: Path, subject: Subject, prefix: str | None, strict: bool) -> _Found:
    """Read what a checkpoint has, and compare it with the model. Nothing is changed."""
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint {folder}")
    subject.check()
    manifest = Manifest.read(folder)
    files = manifest.files if manifest is not None else {}
    index = read_index(folder, files.get(METADATA))
    strange = [each.relative_path for each in index.storage_data.values() if each.relative_path not in files]
    if manifest is not None and strange:
        raise CheckpointError(f"{folder / METADATA} is damaged: it names {strange[0]}, which {MANIFEST} does not have")
    script = read_script(folder, files[SCRIPT]) if SCRIPT in files else None
    for name in ("optimizer", "scheduler", "scaler"):
        if getattr(subject, name) is not None and not getattr(script, name, None):
            raise CheckpointError(
                f"{folder} has no state of {name}"
                + ("" if script is not None else f": it has no {MANIFEST} and {SCRIPT}")
                + f"; load it without {name}"
            )
    if subject.averaged is not None and (script is None or script.averaged is None):
        raise CheckpointError(f"{folder} has no averages; load it without averaged")
    if prefix is None:
        prefix = manifest.prefix if manifest is not None else ""
    indexed = IndexedFolder(folder, index, {name: each.bytes for name, each in files.items()})
    return _compare(world, indexed, manifest, script, subject, prefix, strict)


def _compare(
    world: World,
    folder: IndexedFolder,
    manifest: Manifest | None,
    script: ScriptState | None,
    subject: Subject,
    prefix: str,
    strict: bool,
) -> _Found:
    """What of a checkpoint goes where; CheckpointError where it is another model's."""
    about = folder.index.state_dict_metadata
    described = {name.removeprefix(prefix): each for name, each in about.items() if name.startswith(prefix)}
    targets: dict[str, torch.Tensor] = {}
    pieces: dict[str, TensorPiece] = {}
    later: dict[str, str] = {}
    missing: list[str] = []
    wrong: list[str] = []
    known: set[str] = set()
    for each in state_tensors(world, subject.parameters, subject.model):
        known.update(each.names)
        there = [name for name in each.names if name in described]
        missing += [name for name in each.names if name not in described] if not there or strict else []
        for name in there:
            saved = described[name]
            if not isinstance(saved, TensorStorageMetadata):
                wrong.append(f"{name} is no tensor in the checkpoint")
            elif saved.size != each.tensor.shape:
                wrong.append(
                    f"{name} is {tuple(saved.size)} in the checkpoint, {tuple(each.tensor.shape)} in the model"
                )
        if there and each.held:
            if subject.values is not None:
                later[each.names[0]] = prefix + there[-1]
                continue
            if each.tensor.is_meta:
                wrong.append(
                    f"{name} is on the meta device; wrap the model in RaNNCModule, or give it memory first "
                    "(model.to_empty(device='cpu'))"
                )
            # as in load_state_dict the last of tied names counts
            tensor, place = each.tensor.detach(), prefix + there[-1]
            if isinstance(tensor, TensorPiece):
                pieces[place] = tensor
            else:
                targets[place] = tensor
    extras = extra_states(subject.model)
    missing += [name for name in extras if name not in described]
    unexpected = [name for name in described if name not in known and name not in extras]
    if prefix == "":  # a plain checkpoint may have more than a model in it
        unexpected = [name for name in unexpected if not name.startswith(("optimizer.", f"{AVERAGED}."))]
    if strict:
        wrong += [f"{name} is not in the checkpoint" for name in missing]
        wrong += [f"{name} is not in the model" for name in unexpected]
    if wrong:
        more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
        raise CheckpointError(f"{folder.path} is of another model: {'; '.join(wrong[:8])}{more}. Nothing was loaded")
    held = {
        prefix + name: module
        for name, module in extras.items()
        if isinstance(described.get(name), BytesStorageMetadata)
    }
    return _Found(folder, manifest, script, targets, pieces, later, held, missing, unexpected)


def _damaged(world: World, found: _Found) -> str:
    """'' or which of the files that fall to this rank is damaged: the ranks share the reading of all of them."""
    if found.manifest is None:
        return ""
    names = sorted(name for name in found.manifest.files if name not in (METADATA, SCRIPT))
    try:
        for name in names[world.rank :: world.size]:
            with checked(found.folder.path / name, None, found.manifest.files[name]):
                pass
    except CheckpointError as exc:
        return plain(str(exc))
    return ""


def _optimizer_state(found: _Found, subject: Subject, *, states: bool = True) -> dict[str, Any] | None:
    """This rank's part of the optimizer's state, as its class takes it; without `states` only the groups' settings."""
    whole = subject.optimizer
    if whole is None:
        return None
    assert found.script is not None
    saved = found.script.optimizer
    assert saved is not None
    kind = class_name(whole.optimizer)
    if saved.class_name != kind:
        raise CheckpointError(f"its optimizer is a {saved.class_name}, yours a {kind}. Nothing was loaded")
    skeleton = saved.skeleton
    names = parameter_names(whole, subject.model)
    if len(skeleton.groups) != len(names):
        raise CheckpointError(
            f"its optimizer has {len(skeleton.groups)} groups, yours {len(names)}. Nothing was loaded"
        )
    for number, (mine, there) in enumerate(zip(names, skeleton.keys, strict=True)):
        strange = [name for name in mine if name not in there]
        if strange:
            raise CheckpointError(
                f"{strange[0]} is not in group {number} of its optimizer; make yours of the same parameters, in the "
                "same groups. Nothing was loaded"
            )
        _check_settings(number, whole.optimizer.param_groups[number], skeleton.groups[number])
    held = whole.held_keys(names)
    tensors: dict[str, torch.Tensor] = {}

    def target(name: TensorName) -> torch.Tensor:
        there = dotted(state_name(name))
        about = found.folder.tensor(there)
        return tensors.setdefault(there, torch.empty(about.size, dtype=about.properties.dtype))

    state = skeleton.join(target, whole.needed_keys(names) if states else ())
    find(found.folder, tensors).read()
    return whole.part_of(state, names).state_dict(held)


def _check_settings(number: int, mine: dict[str, Any], there: dict[str, Any]) -> None:
    """CheckpointError where a setting of a group is a number, and something else in the checkpoint."""
    for key, value in there.items():
        if isinstance(mine.get(key), int | float) and isinstance(value, str | bytes | list | tuple | dict | set):
            raise CheckpointError(f"{key} is {value!r:.80} in group {number} of its optimizer. Nothing was loaded")


def _averages(found: _Found, subject: Subject) -> dict[str, torch.Tensor]:
    """The averages of what this rank holds, read beside the present ones."""
    if subject.averaged is None or found.script is None or not found.script.averaged:
        return {}
    held = subject.averaged.own()
    about = found.folder.index.state_dict_metadata
    names = {dotted(average_name(name)): name for name in held}
    for there, name in names.items():
        saved = about.get(there)
        if there in about and (not isinstance(saved, TensorStorageMetadata) or saved.size != held[name].shape):
            raise CheckpointError(f"{there} has not the shape of {name}. Nothing was loaded")
    values = {
        there: torch.empty(held[name].shape, dtype=held[name].dtype) for there, name in names.items() if there in about
    }
    missing = [name for there, name in names.items() if there not in about and isinstance(held[name], nn.Parameter)]
    if missing:
        raise CheckpointError(f"{found.folder.path} has no average of {missing[0]}. Nothing was loaded")
    find(found.folder, values).read()
    return {names[there]: value for there, value in values.items()}


def _put(found: _Found, values: FoundValues, subject: Subject, local: dict[str, Any] | None) -> None:
    """Put everything in its place, or have it put there when the model is deployed."""
    if subject.values is not None:
        subject.values.take(Distributed(found.folder), found.later)
        if subject.optimizer is not None:
            subject.values.afterwards(lambda: _put_states(found, subject))
    values.read()
    for name, piece in found.pieces.items():
        value = torch.empty(piece.shape, dtype=piece.dtype)
        find(found.folder, {name: value}).read()
        piece.copy_(value)
    for name, module in found.extras.items():
        module.set_extra_state(values.values[name])
    if subject.optimizer is not None and local is not None:
        subject.optimizer.own_load_state_dict(local)
    for name in ("scheduler", "scaler"):
        each = getattr(subject, name)
        if each is not None:
            each.load_state_dict(getattr(found.script, name))


def _put_states(found: _Found, subject: Subject) -> None:
    """Load the state of the parameters that this rank's optimizer has now; groups stay as they are."""
    whole = subject.optimizer
    assert whole is not None
    try:
        local = _optimizer_state(found, subject)
    except Exception as exc:
        raise CheckpointError(plain(f"{found.folder.path}: {exc}")) from exc
    assert local is not None
    whole.own_load_state_dict({**local, "param_groups": whole.own_state_dict()["param_groups"]})
