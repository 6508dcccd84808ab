"""Other tensors in the places of a model's parameters and buffers, for a while.

So `state_dict` and `load_state_dict` run as they are, with all hooks and overrides of the user's modules, over a
model of which this rank holds a part: they see whole values, or write where nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class TensorSlot:
    """Where a module has a parameter or buffer."""

    module: nn.Module
    key: str
    name: str
    """Its name in the model's state."""
    original: torch.Tensor
    persistent: bool
    standin: torch.Tensor | None = None

    @property
    def current(self) -> torch.Tensor | None:
        """What is there now."""
        found = self.module._parameters.get(self.key)
        return found if found is not None else self.module._buffers.get(self.key)


def places(model: nn.Module) -> list[TensorSlot]:
    """All parameters and buffers, of each module once, in the order of the model's state."""
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
    """While entered, `make(place)` is in each place, where it is not None; at the end, the originals are back."""

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
                # not into the dicts: modules may have more that follows an assignment (the flat weights of an LSTM)
                setattr(place.module, place.key, place.original)
