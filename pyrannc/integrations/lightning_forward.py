"""A LightningModule whose own ``forward`` is partitioned: the model of it, and what is in place of its ``forward``."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

import pyrannc

TENSORS = ("_modules", "_parameters", "_buffers")
"""Attributes in which torch keeps what a module consists of."""

_SHARED = (*TENSORS, "_non_persistent_buffers_set")
_FOLLOWED = ("training", "_device", "_dtype")
"""What the model has, too, of torch's and Lightning's attributes of a LightningModule."""

_HOOKS = sorted(  # the order in which the class of a model has them is a part of its cache key
    name
    for kind in LightningModule.__mro__
    if not issubclass(nn.Module, kind)
    for name, value in vars(kind).items()
    if isinstance(value, FunctionType) and not name.startswith("_") and name != "forward"
)
"""Methods that ``forward`` does not call: what they read of the LightningModule changes nothing of its graph."""


class OwnForward:
    """In place of ``forward`` of a LightningModule, whose state is then the wrapper's."""

    def __init__(self, lightning_module: LightningModule, wrapper: pyrannc.RaNNCModule) -> None:
        self.wrapper = wrapper
        """Of the model that `by_itself` has made."""
        self._given, self._own = lightning_module.__dict__, wrapper.module.__dict__
        self._replaced = {"forward": self, "state_dict": wrapper.state_dict, "load_state_dict": wrapper.load_state_dict}
        self._fixed = {*self._replaced, *vars(LightningModule())} - {*_FOLLOWED}

    def enter(self) -> None:
        """Take the place."""
        self._given.update(self._replaced)

    def leave(self) -> None:
        """Give it back."""
        for name in self._replaced:
            del self._given[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all ranks, with the attributes that the LightningModule has now."""
        self._own.update({key: value for key, value in self._given.items() if key not in self._fixed})
        return self.wrapper(*args, **kwargs)


def by_itself(lightning_module: LightningModule) -> LightningModule:
    """Return a LightningModule with the same layers, parameters and ``forward``, as a model.

    It has no Trainer, metrics and hooks, whose state changes with each step.
    """
    kind = type(lightning_module)
    theirs = {name: getattr(LightningModule, name) for name in _HOOKS}
    replaced = {name: value for name, value in theirs.items() if getattr(kind, name) is not value}
    found: LightningModule = object.__new__(type(kind.__name__, (kind,), {"__module__": kind.__module__, **replaced}))
    state = found.__dict__
    state.update(lightning_module.__dict__)
    state.update({key: value for key, value in vars(LightningModule()).items() if key not in _SHARED})
    children = lightning_module.named_children()
    state["_modules"] = {name: child for name, child in children if not _has_metrics(child)}
    return found


def has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(recurse), None) is not None


def _has_metrics(module: nn.Module) -> bool:
    return not has_parameters(module) and any(isinstance(each, Metric) for each in module.modules())
