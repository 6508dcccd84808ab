"""Temporarily replace a model's parameters and buffers by other tensors.

This allows `state_dict` and `load_state_dict` to run unmodified, with all hooks and overrides of the user's modules,
on a model of which this rank holds only a part: they read full tensors, or write into temporary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class TensorSlot:
    """A parameter or buffer slot of a module."""

    module: nn.Module
    key: str
    name: str
    """Its name in the model's state_dict."""
    original: torch.Tensor
    persistent: bool
    standin: torch.Tensor | None = None

    @property
    def current(self) -> torch.Tensor | None:
        """The tensor in the slot now."""
        found = self.module._parameters.get(self.key)
        return found if found is not None else self.module._buffers.get(self.key)


def places(model: nn.Module) -> list[TensorSlot]:
    """All parameter and buffer slots, each module once, in the order of the model's state_dict."""
    found: list[TensorSlot] = []
    for path, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for key, tensor in entries.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    persistent = entries is module._parameters or key not in module._non_persistent_buffers_set
                    found.append(TensorSlot(module, key, name, tensor, persistent))
    return found


class StandIns:
    """Context manager that puts `make(place)`, unless None, into each slot, and restores the originals at exit."""

    def __init__(self, model: nn.Module, make: Callable[[TensorSlot], torch.Tensor | None]) -> None:
        self.places = places(model)
        self._make = make

    def __enter__(self) -> StandIns:
        for place in self.places:
            tensor = self._make(place)
            if tensor is None:
                continue
            if place.key in place.module._parameters:
                requires = place.original.requires_grad and not tensor.is_meta
                place.standin = nn.Parameter(tensor, requires_grad=requires)
                place.module._parameters[place.key] = place.standin
            else:
                place.standin = tensor
                place.module._buffers[place.key] = tensor
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            if place.current is not place.original:
                # setattr, because modules may react to assignments (e.g. the flat weights of an LSTM)
                setattr(place.module, place.key, place.original)
