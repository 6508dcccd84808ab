"""Warns if an optimizer steps with gradients of a wrapped model that no backward of its RaNNCModule has given.

They come from code that goes past the wrapper, such as ``inner.forward(x)`` or a call of a submodule. Where each rank
holds the whole model that works, but every rank then trains on its own mini-batches only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rannd import log


class BypassWatch:
    """Watches the steps of the optimizer of one wrapped model, until `close`.

    Args:
        delivered: Returns how often gradients were reduced and given to the model's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, delivered: Callable[[], int]) -> None:
        self._model = weakref.ref(model)
        self._delivered = delivered
        self._before = delivered()
        self._told = False
        itself = weakref.ref(self)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch = itself()
            if watch is not None:
                watch.stepping(closure=any(map(callable, (*args[1:], *kwargs.values()))))

        self._handle = optimizer.register_step_pre_hook(before)

    def stepping(self, *, closure: bool) -> None:
        """Look at the gradients before a step; one with a closure computes them later."""
        before, self._before = self._before, self._delivered()
        model = self._model()
        if self._told or closure or model is None or before != self._before:
            return
        name = next((name for name, parameter in model.named_parameters() if parameter.grad is not None), None)
        if name is None:
            return
        self._told = True
        log.get("RaNNCModule").warning(
            "optimizer.step found a gradient of %s, but no backward went through the RaNNCModule since the last step: "
            "gradients of inner.forward(x) or of a submodule are not averaged over ranks. Call the RaNNCModule, or the "
            "model inside it as inner(x)",
            name,
        )

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()
