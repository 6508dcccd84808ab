"""Registry of wrapped models; refuses to wrap a model that shares modules or tensors with one of them.

A parameter may belong to one wrapped model only, because each of them distributes, reduces and frees its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.parameters.absent import is_absent

_wrapped: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""Wrapper -> wrapped model."""


def enter(wrapper: nn.Module, model: nn.Module) -> None:
    """Register that `wrapper` wraps `model`."""
    _wrapped[wrapper] = model


def leave(wrapper: nn.Module) -> None:
    """Remove a wrapper from the registry."""
    _wrapped.pop(wrapper, None)


def ensure_free(model: nn.Module) -> None:
    """UsageError if a model, a submodule or a tensor of it is already wrapped, or if parameters have been freed."""
    inside = {id(module): name for name, module in model.named_modules()}
    for wrapper, other in list(_wrapped.items()):
        if wrapper is model:
            raise UsageError("the model is itself a RaNNCModule; wrap each model once")
        if other is model:
            raise UsageError("the model is already wrapped in a RaNNCModule; wrap each model once")
        if id(wrapper) in inside:
            raise UsageError(
                f"submodule {inside[id(wrapper)]} of the model is a RaNNCModule; wrap the whole model instead, or call "
                "the RaNNCModule from code outside a wrapped model"
            )
        if id(other) in inside:
            raise UsageError(
                f"submodule {inside[id(other)]} of the model is already wrapped in a RaNNCModule; wrap the whole model "
                "or the submodule, not both"
            )
        for name, module in other.named_modules():
            if id(module) in inside:
                mine = inside[id(module)]
                raise UsageError(
                    f"{f'submodule {mine} of the model' if mine else 'the model'} is submodule {name} of a model that "
                    "is already wrapped in a RaNNCModule; a module may belong to one wrapped model only"
                )
        theirs = {id(tensor): name for name, tensor in _tensors(other)}
        for name, tensor in _tensors(model):
            if id(tensor) in theirs:
                raise UsageError(
                    f"{name} is {theirs[id(tensor)]} of a model that is already wrapped in a RaNNCModule; a parameter "
                    "or buffer may belong to one wrapped model only: wrap one module that contains both models, or "
                    "give each its own copy"
                )
    for name, tensor in model.named_parameters():
        if is_absent(tensor):
            raise UsageError(
                f"parameter {name} has no values on this rank: a RaNNCModule that was dropped had freed it, because "
                "other ranks hold it; call undeploy() before a RaNNCModule is dropped, or build the model again"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
