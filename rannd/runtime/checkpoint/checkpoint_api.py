"""`pyrannc.save_checkpoint` and `pyrannc.load_checkpoint`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from rannd import config as configuration
from rannd import log
from rannd.errors import UsageError
from rannd.runtime.averaged_model import AveragedModel
from rannd.runtime.checkpoint import loading, saving
from rannd.runtime.checkpoint.async_save import PendingSave
from rannd.runtime.checkpoint.content import MODEL
from rannd.runtime.checkpoint.loading import Checkpoint
from rannd.runtime.checkpoint.outline import Subject
from rannd.runtime.comm.world import World, current
from rannd.runtime.module import RaNNCModule
from rannd.runtime.optim.local_optimizer import WholeOptimizer


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    averaged: AveragedModel | None = None,
    step: int | None = None,
    extra: Any = None,
    asynchronous: bool = False,
    prefix: str = MODEL,
) -> PendingSave | None:
    """Write all that a training needs to go on into the folder `path`, whole or not at all. Collective.

    Every rank writes what it holds, each tensor once; random numbers of all ranks go along. A checkpoint that is at
    `path` already is replaced in one step when the new one is on disk. Call it between steps: gradients are not saved.

    Args:
        path: The checkpoint's folder, on a file system that all nodes share. Folders above it are made.
        model: A RaNNCModule, before or after its first call, or a plain module, which rank 0 writes.
        optimizer: The optimizer that the model was wrapped with, also as `accelerator.prepare` returns it.
        scheduler, scaler: Anything with state_dict and load_state_dict, the same on all ranks; rank 0's is saved.
        averaged: The `pyrannc.AveragedModel` of the model.
        step: A number to be given back.
        extra: Plain data to be given back, rank 0's: None, numbers, texts, bytes, lists, tuples, dicts.
        asynchronous: Return when this rank's values are copied to the CPU, and write while the script goes on. The
            next save or load waits for it. Its error is raised by the next collective call; where there is none, the
            process ends with exit code 8.
        prefix: What comes before the model's names in the index.

    Returns:
        With `asynchronous`, something to `wait()` for.

    Raises:
        UsageError: The optimizer is another one, or something cannot be stored. On all ranks.
        CheckpointError: It cannot be written, or an asynchronous save before failed. On all ranks; what was at `path`
            is as it was.
        StepError: Ranks are at different places of the script.
    """
    world, subject = subject_of(model, optimizer, scheduler, scaler, averaged)
    if isinstance(model, RaNNCModule) and model._session.something_waits:
        log.get("RaNNCModule").warning(
            "Gradients wait for their reduction (delay_grad_allreduce); a checkpoint does not have them. Save after "
            "optimizer.step()"
        )
    return saving.save(world, path, subject, prefix=prefix, step=step, extra=extra, asynchronous=asynchronous)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    averaged: AveragedModel | None = None,
    strict: bool = True,
    rng: bool = True,
    prefix: str | None = None,
) -> Checkpoint:
    """Go on from a checkpoint, under any plan and number of ranks, before or after the model's first call. Collective.

    Each rank reads what it holds; before the first call the whole model, but for one on the meta device: its values and
    the optimizer's state are read at the first call, by the ranks that hold them then. Everything is checked first,
    checksums too: where something is wrong on any rank, nothing has changed on any. No code in the files is run.

    Args:
        path: A folder that `save_checkpoint` or ``torch.distributed.checkpoint.save`` wrote.
        model, optimizer, scheduler, scaler, averaged: What to load; what is left out is not loaded.
        strict: The checkpoint has exactly the model's names.
        rng: Put random numbers back as well: the script's on ranks that the saved job had, and the model's.
        prefix: What comes before the model's names in the index; None: as `save_checkpoint` wrote it, else nothing.

    Returns:
        `step` and `extra` as they were saved; with ``strict=False`` also `missing` and `unexpected` names.

    Raises:
        CheckpointError: There is none, it is damaged, or another model's. On all ranks.
        UsageError: The optimizer is not the one that the model was wrapped with.
        StepError: Ranks are at different places of the script.
    """
    world, subject = subject_of(model, optimizer, scheduler, scaler, averaged)
    found, position = loading.load(world, path, subject, prefix=prefix, strict=strict, rng=rng)
    if position is not None and isinstance(model, RaNNCModule):
        model._session.resume(*position)
    return found


def subject_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    scaler: Any,
    averaged: AveragedModel | None,
) -> tuple[World, Subject]:
    """Return the ranks, and what a checkpoint of these is of. UsageError for arguments of other kinds."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a checkpoint is of a torch.nn.Module, not of a {type(model).__qualname__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__qualname__}; a torch.optim.Optimizer is wanted")
    if averaged is not None and (not isinstance(averaged, AveragedModel) or averaged.module is not model):
        raise UsageError("averaged is a pyrannc.AveragedModel of the model that is saved or loaded")
    if isinstance(model, RaNNCModule):
        model._session.alive()
        session = model._session
        if session.parameters is not None:
            session.parameters.adopt()
        values = session.values if session.parameters is None and session.values.bare else None
        whole = _whole(optimizer, session.world)
        position = session.random_position
        subject = Subject(model._inner, session.parameters, position, whole, scheduler, scaler, values, averaged)
        return session.world, subject
    config = configuration.load()
    log.setup(level=config.log_level)
    world = current(config)
    return world, Subject(model, None, (0, 0), _whole(optimizer, world), scheduler, scaler)


def _whole(optimizer: torch.optim.Optimizer | None, world: World) -> WholeOptimizer | None:
    inner = getattr(optimizer, "optimizer", None)  # as of Accelerate, whose prepared optimizer holds the script's
    if isinstance(inner, torch.optim.Optimizer):
        optimizer = inner
    return None if optimizer is None else WholeOptimizer.of(optimizer, world)
