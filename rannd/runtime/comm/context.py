"""Context of one wrapped model: ranks, configuration, model, optimizer and cache, passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rannd import log
from rannd.config import Config
from rannd.runtime.comm.cache_client import Cache
from rannd.runtime.comm.world import World
from rannd.runtime.failure.nan_check import Finite
from rannd.runtime.timeline.recorder import StepRecorder
from rannd.runtime.timeline.recorders import recorder_for


@dataclass(frozen=True)
class WrapOptions:
    """Arguments of `RaNNCModule` other than the model and the optimizer."""

    load_deployment: Path | None = None
    """File with a deployment to use instead of planning."""
    checkpoint: Path | None = None
    """File or folder with the initial values of the parameters."""
    sync: bool = False
    """Whether rank 0's parameters are broadcast at deployment."""
    all_outputs: bool = False
    """Whether training returns all outputs of a model with a loss on every rank, regardless of their size."""
    scaler: torch.amp.GradScaler | None = None
    """The script's GradScaler."""
    shared: bool = False
    """Whether all ranks share rank 0's mini-batch (gather_inputs=False)."""
    total_calls: int | None = None
    """Number of the model's calls in the whole training, if the script knows it."""

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled by an enabled GradScaler."""
        return self.scaler is not None and self.scaler.is_enabled()


@dataclass(frozen=True, eq=False)
class Context:
    """Immutable context of one wrapped model, used by all parts of the runtime."""

    world: World
    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    cache: Cache
    options: WrapOptions
    finite: Finite
    """NaN checks as configured by `check_nan`."""
    recorder: StepRecorder
    """What its steps are recorded with, as configured by `trace_events` and `event_trace_file`."""
    subject: log.LogSubject
    """Its name in lines of the log."""

    @staticmethod
    def of(
        world: World,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        options: WrapOptions | None = None,
    ) -> Context:
        """Create the context of a model that is about to be wrapped."""
        return Context(
            world,
            config,
            model,
            optimizer,
            Cache(world, config),
            options if options is not None else WrapOptions(),
            Finite(config.check_nan),
            recorder_for(world.device, config.trace_events, config.event_trace_file),
            log.LogSubject(type(model).__name__),
        )

    @property
    def averaged(self) -> int:
        """Number of mini-batches that gradients are averaged over: the world size, or 1 if all ranks share one."""
        return 1 if self.options.shared else self.world.size
