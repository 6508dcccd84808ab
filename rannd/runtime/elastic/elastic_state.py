"""`pyrannc.elastic`: a training that is saved between steps, and goes on from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from rannd import config as configuration
from rannd import log
from rannd.errors import CheckpointError, UsageError
from rannd.ranks import rank_notes
from rannd.runtime.averaged_model import AveragedModel
from rannd.runtime.checkpoint import rescue
from rannd.runtime.checkpoint.async_save import PendingSave
from rannd.runtime.checkpoint.checkpoint_api import load_checkpoint, subject_of
from rannd.runtime.checkpoint.content import MODEL
from rannd.runtime.checkpoint.outline import Subject
from rannd.runtime.checkpoint.saving import save
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.lockstep import Phase, agree
from rannd.runtime.elastic.checkpoint_folders import folder_of, prune, saved_steps
from rannd.runtime.elastic.elastic_sampler import ElasticSampler
from rannd.runtime.elastic.leave_request import LeaveRequest
from rannd.runtime.elastic.snapshots import Snapshots
from rannd.runtime.elastic.stragglers import Stragglers, row_bounds
from rannd.runtime.module import RaNNCModule

_TELL_S = 1.0
"""Minimum seconds between two notes of the present step to rannc-run."""
_KEY = "pyrannc.elastic"
_RUNNING, _WHOLE, _FAILED = 1, 2, 3
"""States of an asynchronous save; 0: there is none."""

_present: ElasticState | None = None
"""The training of this process: the ranks save and end with one alone."""


class ElasticSettings(msgspec.Struct, frozen=True):
    """Configuration items that all ranks have to have alike."""

    every: int
    """Steps between checkpoints."""
    kept: int
    """Number of checkpoints."""
    snapshots: str
    straggler_factor: float
    directory: str
    """As rank 0 names it: other hosts may have it elsewhere."""


class ElasticState:
    """What `pyrannc.elastic` returns."""

    def __init__(
        self,
        model: RaNNCModule,
        optimizer: torch.optim.Optimizer,
        parts: dict[str, Any],
        sampler: ElasticSampler | None,
        directory: Path,
        settings: ElasticSettings,
    ) -> None:
        self.step = 0
        """Number of optimizer steps that are done."""
        self.restored = False
        """Whether there was a checkpoint to go on from."""
        self.extra: dict[str, Any] = {}
        """The script's own plain data, which is saved and restored with the rest; rank 0's."""
        self._model, self._optimizer, self._parts, self._sampler = model, optimizer, parts, sampler
        self._directory = directory
        self._world = model._session.world
        told = self._world.broadcast_bytes(msgspec.msgpack.encode(settings))
        settings = msgspec.msgpack.decode(told, type=ElasticSettings)  # hosts can have other files
        self._every, self._kept = settings.every, settings.kept
        self._saved = 0
        """Step of the newest checkpoint that is whole or on its way, or that failed."""
        self._whole = -1
        self._pending: PendingSave | None = None
        self._pending_step = 0
        self._pruning: threading.Thread | None = None
        """Removes old checkpoints."""
        self._seen = 0
        """Step at the last time between steps."""
        self._told_at = -_TELL_S
        self._restore()
        self._snapshots = Snapshots(self._world, settings.snapshots, settings.directory)
        self._leave = LeaveRequest()
        balanced = sampler.balanced if sampler is not None else None
        self._stragglers = Stragglers(self._world, settings.straggler_factor, self._bounds, balanced)
        inner = getattr(optimizer, "optimizer", None)  # as of Accelerate, whose prepared optimizer holds the script's
        inner = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        self._hook = inner.register_step_post_hook(self._count)
        told_of: dict[str, int] = {rank_notes.BEGAN: self.step}
        if sampler is None:
            model._session.between_steps = self._between
        else:
            sampler.between = self._between
            sampler.calls = lambda: model._session.random_position[1]
            told_of[rank_notes.MOST] = sampler.most_ranks
        if self._world.rank == 0:  # one rank alone: notes of several have no order
            rank_notes.tell(**told_of)

    def close(self) -> None:
        """Neither save nor leave any more, so that another training of this process may."""
        global _present
        if _present is self:
            _present = None
        self._snapshots.close()
        self._leave.close()
        self._stragglers.close()
        self._hook.remove()
        self._model._session.between_steps = None
        if self._sampler is not None:
            self._sampler.between, self._sampler.calls = (lambda: None), None

    def _count(self, *_: Any) -> None:
        self.step += 1

    def between(self) -> None:
        """Save if it is time to, and end if that was asked for. Collective.

        It is called between batches of the sampler, or else before the first call of the model after a step. The
        script may call it as well, at the end of its loop's body. Does nothing if no step was made since the last time.

        Raises:
            SystemExit: rannc-run, or a batch system (SIGUSR1), has asked some rank to end; all is saved.
            StepError: Ranks are at different places of the script.
        """
        if self._sampler is not None:
            self._sampler.commit()
        self._between()

    def save(self) -> None:
        """Save now, unless this step is saved; at the end of a training, for example. Collective.

        Call it where the script is done with a batch. CheckpointError if it cannot be written.
        """
        if self._sampler is not None:
            self._sampler.commit()
        self._await_save()
        self._snapshots.close()  # the script may end the process groups next
        if self._whole != self.step and (error := self._save(asynchronous=False)) is not None:
            raise error

    def _between(self) -> None:
        averaged = self._parts["averaged"]
        if self.step == self._seen or (averaged is not None and averaged.swapped):
            return
        self._seen = self.step
        mine = (int(self._leave.asked), self._state_of_save(), self._snapshots.ready(), *self._stragglers.ratios())
        told = agree(self._world, Phase.ELASTIC, self.step, *mine)
        self._settle([state for _, state, *_ in told])
        self._stragglers.take([(ratio, scaled) for *_, ratio, scaled in told])
        if any(asked for asked, *_ in told):
            self._end()
        self._snapshots.go_on([ready for _, _, ready, *_ in told], self.step, self._what)
        if self.step - self._saved >= self._every and self._pending is None:
            self._warn(self._save(asynchronous=True))
        if time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            rank_notes.tell(**{rank_notes.STEP: self.step})

    # -- saving -----------------------------------------------------------------------------------------------

    def _state_of_save(self) -> int:
        if self._pending is None:
            return 0
        if not self._pending.done():
            return _RUNNING
        return _WHOLE if self._pending.error is None else _FAILED

    def _settle(self, states: list[int]) -> None:
        """Take the end of an asynchronous save, when all ranks know it."""
        if self._pending is None or _RUNNING in states:
            return
        if _FAILED in states:
            self._warn(self._pending.error or CheckpointError("another rank could not save"))
        else:
            self._finish(self._pending_step)
        self._pending = None

    def _await_save(self) -> None:
        """Wait for an asynchronous save. Collective."""
        if self._pending is not None:
            self._pending.join()
            self._settle([state for (state,) in agree(self._world, Phase.ELASTIC, self.step, self._state_of_save())])

    def _warn(self, error: CheckpointError | None) -> None:
        if error is not None and self._world.rank == 0:
            log.get("RaNNCModule").error("%s. The training goes on; the next try is in %d steps", error, self._every)

    def _finish(self, step: int) -> None:
        self._whole = step
        if self._world.rank == 0:
            rank_notes.tell(**{rank_notes.WHOLE: step})
            # beside the training: a network file system takes its time
            arguments = (self._directory, step, self._kept)
            self._pruning = threading.Thread(target=prune, args=arguments, name="rannd old checkpoints")
            self._pruning.start()

    def _save(self, *, asynchronous: bool) -> CheckpointError | None:
        """Save; return the error, which all ranks have."""
        self._saved = self._pending_step = self.step
        try:
            subject, extra = self._what()
            self._pending = save(
                self._world,
                folder_of(self._directory, self.step),
                subject,
                prefix=MODEL,
                step=self.step,
                extra=extra,
                asynchronous=asynchronous,
                asks=True,
            )
        except CheckpointError as error:
            return error
        if not asynchronous:
            self._finish(self.step)
        return None

    def _bounds(self) -> tuple[int, int] | None:
        """The `least` and `most` of `RowShares`; None: shares are to be even."""
        session = self._model._session
        if self._sampler is None or not self._sampler.balance or session.promise is None or session.coupled:
            return None
        return row_bounds(session.promise.deployment, session.promise.usable)

    def _what(self) -> tuple[Subject, dict[str, Any]]:
        """What belongs into a checkpoint of this step."""
        state = {"step": self.step, "extra": dict(self.extra)}
        if self._sampler is not None:
            state["sampler"] = self._sampler.state_dict()
        _, subject = subject_of(self._model, self._optimizer, **self._parts)
        return subject, {_KEY: state}

    def _end(self) -> None:
        """Save what is not saved, and end this process."""
        self._snapshots.close()
        self._await_save()
        error = self._save(asynchronous=False) if self._whole != self.step else None
        if self._world.rank == 0:
            logger, newest = log.get("RaNNCModule"), f"step {self._whole}" if self._whole >= 0 else "none"
            if error is not None:
                logger.error("%s", error)
            logger.info("Ending after step %d, as asked; the newest checkpoint: %s", self.step, newest)
        rank_notes.tell(**{rank_notes.LEFT: self.step, rank_notes.STEP: self.step})
        # Whoever starts ranks without an elastic rannc-run has to know that the training is not over.
        raise SystemExit(0 if rank_notes.heard() else 128 + signal.SIGUSR1)

    # -- going on ---------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Go on from the newest checkpoint that is whole."""
        steps: list[int] = []
        error = ""
        if self._world.rank == 0:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)  # watchers do not: a disk may not be mounted there
                steps = saved_steps(self._directory, resume_step())
                self._rescue(steps)
            except OSError as exc:
                error = f"{self._directory} cannot be used: {exc}; name a directory that all ranks can use"
        agree_on_errors(self._world, error, CheckpointError)
        steps = msgspec.msgpack.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(steps)), type=list[int])
        wrong: CheckpointError | None = None
        for step in steps:
            try:
                self._load(step)
                if self._world.rank == 0:
                    rescue.forget(self._directory, step)
                return
            except CheckpointError as exc:  # on all ranks
                wrong = exc
                if self._world.rank == 0:
                    log.get("RaNNCModule").warning("The checkpoint of step %d is left out: %s", step, exc)
        if wrong is not None:
            raise CheckpointError(
                f"none of the checkpoints in {self._directory} can be loaded; the last error: {wrong}. Remove them, or "
                "name another directory, to begin anew"
            )

    def _rescue(self, steps: list[int]) -> None:
        """Make checkpoints of what was left after failures, and put them among `steps`: later ones may be damaged."""
        for step, folder in rescue.rescued(self._directory, _told(rank_notes.RESCUED_FOLDER)):
            if step in steps:
                continue
            try:
                rescue.make_checkpoint(folder, folder_of(self._directory, step))
            except CheckpointError as exc:
                log.get("RaNNCModule").warning("Step %d, kept in memory, is left out: %s", step, exc)
            else:
                steps.append(step)
                steps.sort(reverse=True)

    def _load(self, step: int) -> None:
        found = load_checkpoint(folder_of(self._directory, step), self._model, self._optimizer, **self._parts)
        state = found.extra.get(_KEY) if isinstance(found.extra, dict) else None
        if not isinstance(state, dict) or state.get("step") != step:
            raise CheckpointError(f"{folder_of(self._directory, step)} was not saved by pyrannc.elastic")
        if self._sampler is not None:
            if "sampler" not in state:
                raise UsageError(f"{folder_of(self._directory, step)} was saved without a sampler; give none")
            self._sampler.load_state_dict(state["sampler"])
        self.step = self._seen = self._saved = self._whole = step
        self.extra, self.restored = state["extra"], True
        if self._world.rank == 0:
            log.get("RaNNCModule").info("Going on after step %d, from %s", step, folder_of(self._directory, step))


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    sampler: ElasticSampler | None = None,
    scaler: Any = None,
    averaged: AveragedModel | None = None,
    *,
    directory: str | os.PathLike[str],
    every: int = 0,
) -> ElasticState:
    """Go on from the newest whole checkpoint in `directory`, and save there from now on. Collective.

    A checkpoint is written every so many steps, while the script trains. When rannc-run (``--elastic``) or a batch
    system asks the ranks to end (SIGUSR1 on any of them), they save after the step in progress, and end with
    SystemExit(0). This happens when the script gets its next batch of the sampler, or without one when it calls the
    model for the first time after a step.

    Args:
        model: The RaNNCModule, before or after its first call.
        optimizer: The optimizer that it was wrapped with.
        scheduler, scaler, averaged: As of `save_checkpoint`.
        sampler: The ElasticSampler of the training's DataLoader; its epoch and position are restored.
        directory: The folder of the checkpoints of this training, which all nodes share.
        every: Number of steps between checkpoints; 0: the configuration item checkpoint_every.

    Returns:
        `step`, the number of steps that are done; `restored`; `extra`, a dict of the script's own plain data.

    Raises:
        CheckpointError: None of the checkpoints there can be loaded. On all ranks.
        UsageError: An argument is of another kind, or the sampler has other batches than the one that was saved.
        StepError: Ranks are at different places of the script.
    """
    if not isinstance(model, RaNNCModule):
        raise UsageError(f"elastic takes a pyrannc.RaNNCModule, not a {type(model).__qualname__}; wrap the model first")
    if sampler is not None and not isinstance(sampler, ElasticSampler):
        raise UsageError(
            f"sampler is a {type(sampler).__qualname__}; use pyrannc.ElasticSampler(dataset, batch_size), given to the "
            "DataLoader as batch_sampler, whose batches do not depend on the number of ranks"
        )
    if not isinstance(every, int) or every < 0:
        raise UsageError(f"every = {every!r}; give a number of steps, 1 or more")
    global _present
    model._session.alive()
    if _present is not None:
        raise UsageError(
            "pyrannc.elastic was called before, and a job saves and ends with one training; close() that state first"
        )
    config = configuration.load()
    parts = {"scheduler": scheduler, "scaler": scaler, "averaged": averaged}
    place = Path(directory).expanduser().absolute()
    settings = ElasticSettings(
        every or config.checkpoint_every,
        config.checkpoints_kept,
        config.snapshots,
        config.straggler_factor,
        str(place),
    )
    _present = ElasticState(model, optimizer, parts, sampler, place, settings)
    return _present


def _told(name: str) -> str:
    """What rannc-run has told this rank in a variable; '' in processes that a rank has started."""
    return os.environ.get(name, "") if rank_notes.heard() else ""


def resume_step() -> int | None:
    """Return the step of the newest checkpoint that an elastic rannc-run knows of; None at the first start.

    For scripts that save and load themselves (`save_checkpoint` with ``step=``).
    """
    found = os.environ.get(rank_notes.RESUME_STEP, "")
    return int(found) if found.isdecimal() else None
