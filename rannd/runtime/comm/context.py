"""What all parts of one wrapped model have in common, handed to each of them as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rannd.config import Config
from rannd.runtime.comm.cache_client import Cache
from rannd.runtime.comm.world import World
from rannd.runtime.failure.nan_check import Finite


@dataclass(frozen=True)
class WrapOptions:
    """What the script said when it wrapped the model: see `RaNNCModule`."""

    load_deployment: Path | None = None
    """A deployment to use instead of a plan."""
    checkpoint: Path | None = None
    """A file or folder with the parameters' values."""
    sync: bool = False
    """Ranks take rank 0's parameters at deployment."""
    all_outputs: bool = False
    """Outputs beside a loss are handed to the ranks in training, however large they are."""
    scaler: torch.amp.GradScaler | None = None
    """What scales the script's losses."""
    shared: bool = False
    """All ranks run rank 0's mini-batch."""

    @property
    def scaled(self) -> bool:
        """Whether losses in half precision have a scaler that tells their scale."""
        return self.scaler is not None and self.scaler.is_enabled()


@dataclass(frozen=True, eq=False)
class Context:
    """One wrapped model among the ranks of the job; nothing of it changes until it is dropped."""

    world: World
    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    cache: Cache
    options: WrapOptions
    finite: Finite
    """Checks for NaN, as the configuration wants them."""

    @staticmethod
    def of(
        world: World,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        options: WrapOptions | None = None,
    ) -> Context:
        """The context of a model that is about to be wrapped."""
        return Context(
            world,
            config,
            model,
            optimizer,
            Cache(world, config),
            options if options is not None else WrapOptions(),
            Finite(config.check_nan),
        )

    @property
    def averaged(self) -> int:
        """The number of ranks whose mini-batches are averaged over: 1 where one is shared by all."""
        return 1 if self.options.shared else self.world.size
