"""Notices optimizers that step a wrapped model's parameters without having been given to its RaNNCModule.

They train as they should: a rank's parameters have their gradients. But where ranks have different parameters, each
optimizer's state is about its rank's alone, which would be saved as if it were all.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rannd import log, patches
from rannd.errors import UsageError
from rannd.runtime.comm.world import made
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.parameters.absent import is_absent

_METHODS = ("__reduce_ex__", "load_state_dict", "state_dict")
_STEPS = patches.declare_hook(
    "steps of all optimizers",
    register_optimizer_step_pre_hook,
    "an optimizer that a RaNNCModule was not given has a part of its state on each rank",
)
_found: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def install() -> None:
    """Look at the steps of all optimizers, until `remove`."""
    patches.install(_STEPS.by(_before))


def remove() -> None:
    """Look no more, and give the optimizers that were found their methods back."""
    patches.remove(_STEPS)
    for optimizer in list(_found):
        for name in _METHODS:
            with contextlib.suppress(AttributeError):
                delattr(optimizer, name)
    _found.clear()


def _before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _found or WholeOptimizer.is_attached(optimizer):
        return
    if not any(is_absent(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return
    _found.add(optimizer)
    kind = type(optimizer).__name__
    world = made()
    if world is None or world.rank == 0:
        log.get("RaNNCModule").warning(
            "%s steps parameters of a RaNNCModule that was not given it, so that its state can be neither saved nor "
            "loaded as a whole. Write RaNNCModule(model, optimizer)",
            kind,
        )

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{kind} was not given to the RaNNCModule whose parameters it steps: its state on this rank is about the "
            "parameters of this rank alone. Write RaNNCModule(model, optimizer)"
        )

    for name in _METHODS:
        setattr(optimizer, name, refuse)
