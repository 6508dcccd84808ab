"""What is known of a model of the zoo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations only: nothing is ever downloaded

Batch = dict[str, Any]
"""Keyword arguments of one call."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A small model with random weights, in training mode, used as its users use it.

    `build` and `batch` draw from torch's generator: the same seed gives the same weights and the same data. Build,
    call and trace the model within `precision`.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """The keyword arguments of a call with so many rows."""
    dtype: torch.dtype = torch.float64
    """What it is compared in: doubles, unless its operators exist for floats alone."""
    random: bool = False
    """Draws random numbers in every call, although no dropout is on: layers that are left out, masked frames."""

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Makes `dtype` the default, and lets casts to float keep doubles.

        transformers computes losses in floats, whatever a model is made of.
        """
        default, cast = torch.get_default_dtype(), torch.Tensor.float
        torch.set_default_dtype(self.dtype)
        if self.dtype is torch.float64:
            torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            torch.Tensor.float = cast  # type: ignore[method-assign]


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds a model of transformers, by the names of its classes."""

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.to(torch.get_default_dtype()).train()  # some parameters are floats whatever the default

    return build
