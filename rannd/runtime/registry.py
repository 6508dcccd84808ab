"""Which models are wrapped, and what may be wrapped beside them.

A parameter belongs to one wrapped model: each deploys, reduces and frees its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from rannd.errors import UsageError

_wrapped: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""Wrapper -> wrapped model."""


def enter(wrapper: nn.Module, model: nn.Module) -> None:
    """Note that `wrapper` wraps `model`."""
    _wrapped[wrapper] = model


def leave(wrapper: nn.Module) -> None:
    """Forget a wrapper."""
    _wrapped.pop(wrapper, None)


def ensure_free(model: nn.Module) -> None:
    """UsageError where a model, a part of it or one of its tensors is wrapped already, or is not all here."""
    inside = {id(module): name for name, module in model.named_modules()}
    for wrapper, other in list(_wrapped.items()):
        if wrapper is model:
            raise UsageError("this is a RaNNCModule, which is wrapped already; wrap each model once")
        if other is model:
            raise UsageError("this model is wrapped in a RaNNCModule already; wrap each model once")
        if id(wrapper) in inside:
            raise UsageError(
                f"submodule {inside[id(wrapper)]} of the model is a RaNNCModule; wrap the whole model, or call the "
                "RaNNCModule from code that is not wrapped"
            )
        if id(other) in inside:
            raise UsageError(
                f"submodule {inside[id(other)]} of the model is wrapped in a RaNNCModule already; wrap the whole model "
                "or the submodule, not both"
            )
        for name, module in other.named_modules():
            if id(module) in inside:
                mine = inside[id(module)]
                raise UsageError(
                    f"{f'submodule {mine} of the model' if mine else 'the model'} is submodule {name} of a model that "
                    "is wrapped in a RaNNCModule already; a module belongs to one wrapped model"
                )
        theirs = {id(tensor): name for name, tensor in _tensors(other)}
        for name, tensor in _tensors(model):
            if id(tensor) in theirs:
                raise UsageError(
                    f"{name} is {theirs[id(tensor)]} of a model that is wrapped in a RaNNCModule already; a parameter "
                    "or buffer belongs to one wrapped model: wrap one module that has both models, or give each a copy"
                )
    for name, tensor in model.named_parameters():
        if _freed(tensor):
            raise UsageError(
                f"parameter {name} is not here: a RaNNCModule gave its memory back to other ranks and is gone; call "
                "its undeploy() before it is dropped, or build the model anew"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a rank keeps of the parameters of other stages: one NaN, expanded."""
    if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter) or tensor.numel() < 2:
        return False
    data = tensor.detach()
    if data.layout is not torch.strided or any(data.stride()) or not (data.is_floating_point() or data.is_complex()):
        return False
    return bool(data.reshape(-1)[0].isnan())
