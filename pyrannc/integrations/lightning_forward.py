"""A LightningModule whose own ``forward`` is partitioned: the model of it, and what is in place of its ``forward``."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

import pyrannc
from rannd.errors import UsageError
from rannd.graph.modules.attribute_reads import UNCALLED, Mentions

TENSORS = ("_modules", "_parameters", "_buffers")
"""Attributes in which torch keeps what a module consists of."""

_SHARED = (*TENSORS, "_non_persistent_buffers_set")
_FOLLOWED = ("training", "_device", "_dtype")
"""What the model has, too, of torch's and Lightning's attributes of a LightningModule."""

_OF_TRAINER = ("trainer", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers")
"""Properties that read the Trainer."""


class OwnForward:
    """In place of ``forward`` of a LightningModule, whose state is then the wrapper's."""

    def __init__(self, lightning_module: LightningModule, wrapper: pyrannc.RaNNCModule, read: Mentions) -> None:
        self.wrapper = wrapper
        """Of the model that `by_itself` has made."""
        self._read = read
        self._given, self._own = lightning_module.__dict__, wrapper.module.__dict__
        self._replaced = {"forward": self, "state_dict": wrapper.state_dict, "load_state_dict": wrapper.load_state_dict}
        self._before = {name: self._given[name] for name in self._replaced if name in self._given}
        self._fixed = {*self._replaced, *_METHODS, *vars(LightningModule())}
        self._outside = no_layers(lightning_module).keys()
        self._followed = self._attributes()

    def enter(self) -> None:
        """Take the place."""
        self._given.update(self._replaced)

    def leave(self) -> None:
        """Give it back."""
        for name in self._replaced:
            del self._given[name]
        self._given.update(self._before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all ranks, with the attributes and layers that the LightningModule has now."""
        before, self._followed = self._followed, self._attributes()
        for name in before.keys() - self._followed.keys():
            del self._own[name]
        self._own.update(self._followed)
        children = {name: child for name, child in self._given["_modules"].items() if name not in self._outside}
        if children != self._own["_modules"]:
            self._own["_modules"] = children
        return self.wrapper(*args, **kwargs)

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes of the LightningModule that ``forward`` reads, as they are now."""
        own = {name: value for name, value in self._given.items() if name not in self._fixed and name in self._read}
        return own | {name: self._given[name] for name in _FOLLOWED}


def by_itself(lightning_module: LightningModule) -> tuple[LightningModule, Mentions]:
    """Return a LightningModule with the same layers, parameters and ``forward``, as a model, and what its code reads.

    It has no Trainer, metrics and hooks, whose state changes with each step, and none of the methods that ``forward``
    does not call, nor the attributes that these alone read: they change nothing of its graph.

    Raises:
        UsageError: The class of the LightningModule cannot be derived from.
    """
    made: Any = _class_without_trainer(type(lightning_module))
    found: LightningModule = object.__new__(made)
    state, of_lightning = found.__dict__, vars(LightningModule())
    state.update({key: value for key, value in lightning_module.__dict__.items() if key not in _METHODS})
    state.update({key: value for key, value in of_lightning.items() if key not in _SHARED})
    children, outside = lightning_module.__dict__["_modules"].items(), no_layers(lightning_module)
    state["_modules"] = {name: child for name, child in children if name not in outside}
    read = take_trainer(found)
    for name in [name for name in state if name not in of_lightning and name not in read]:
        del state[name]
    for name in vars(made)[UNCALLED]:  # sorted: the order is a part of the model's cache key
        setattr(made, name, _uncalled)
    return found, read


def take_trainer(model: nn.Module) -> Mentions:
    """Take the Trainer, whose state changes with each step, from all LightningModules in a model.

    Returns what the model's code reads; that of methods that no ``forward`` calls, such as ``training_step``, is left
    out.

    Raises:
        UsageError: The class of a LightningModule cannot be derived from.
    """
    inside = [each for each in model.modules() if isinstance(each, LightningModule)]
    made: dict[type[LightningModule], Any] = {}
    for each in inside:
        kind = type(each)
        if not _has_none(kind):
            each.__class__ = made[kind] = made.get(kind) or _class_without_trainer(kind)
            each.__dict__.update({"_trainer": None, "_fabric": None})
    uncalled = {kind: _own_methods(kind) for kind in dict.fromkeys(map(type, inside))}
    reached = True
    while reached:
        for kind, names in uncalled.items():
            setattr(kind, UNCALLED, sorted(names))
        read, reached = Mentions(model), False
        for names in uncalled.values():
            called = {name for name in names if name in read}
            names -= called
            reached |= bool(called)
    return read


def has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(recurse), None) is not None


def no_layers(lightning_module: LightningModule) -> dict[str, nn.Module | None]:
    """Return the children of a LightningModule that its model does not have: metrics, of which nothing is trained."""
    children = lightning_module.__dict__["_modules"].items()
    return {name: child for name, child in children if not _is_layer(child)}


def _is_layer(child: nn.Module | None) -> bool:
    if child is None or any(parameter.requires_grad for parameter in child.parameters()):
        return True
    return not any(isinstance(each, Metric) for each in child.modules())


_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""Methods that torch.compile of a LightningModule replaces in the instance."""


def _own_methods(kind: type[LightningModule]) -> set[str]:
    """Names of the methods of a class and its bases that nn.Module does not have."""
    return {
        name
        for base in kind.__mro__
        if not issubclass(nn.Module, base)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and not name.startswith("__") and not hasattr(nn.Module, name)
    }


def _class_without_trainer(kind: type[LightningModule]) -> type[LightningModule]:
    """Derive a class whose objects raise UsageError where ``forward`` reads the Trainer."""
    own = {name: property(partial(_without_trainer, name), _leave_trainer) for name in _OF_TRAINER}
    try:
        return type(kind.__name__, (kind,), {"__module__": kind.__module__, **own})
    except Exception as exc:  # code of the user's classes may raise anything
        raise UsageError(
            f'strategy="rannc": {kind.__name__} itself cannot be partitioned, as a class derived from it raises '
            f"{type(exc).__name__}: {exc}; put all layers into one module, and call that in training_step"
        ) from exc


def _has_none(kind: type[LightningModule]) -> bool:
    trainer = vars(kind).get("trainer")
    return isinstance(trainer, property) and trainer.fset is _leave_trainer


def _leave_trainer(*_: Any) -> None:
    """Lightning gives the Trainer to all children that are LightningModules."""


def _without_trainer(name: str, _: LightningModule) -> Any:
    raise UsageError(
        f"self.{name} is not known where a LightningModule is partitioned: a graph has neither its Trainer nor what "
        f"that knows. Keep the value in an attribute that forward reads, such as self.now = self.{name} in "
        "on_train_batch_start of the LightningModule that the Trainer has"
    )


def _uncalled(*_: Any, **__: Any) -> Any:
    raise UsageError(
        "forward of a LightningModule that is partitioned calls a method by a name that is not in its code; call it by "
        "its name"
    )
