"""`model.step(inputs)` of Varuna's training loops: forward and backward of a mini-batch in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rannd.errors import UsageError


class Wrapper(Protocol):
    """What this needs of a RaNNCModule."""

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""

    def calc_grad_norm(self) -> float:
        """Norm of all gradients."""


def training_step(
    model: Wrapper, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, scaler: Any
) -> tuple[Tensor, bool]:
    """Run forward and backward of this rank's mini-batch. Collective.

    Args:
        model: The wrapped model.
        inputs: Its arguments by name.
        optimizer: Its optimizer, whose gradients `scaler` unscales.
        scaler: The GradScaler that RaNNCModule was given; None: gradients are not scaled.

    Returns:
        The loss, and whether a gradient is not finite on any rank: then the script leaves out ``optimizer.step()``.

    Raises:
        UsageError: `inputs` is not a dict, or the model returns no loss.
    """
    if not isinstance(inputs, Mapping):
        raise UsageError(f"step takes a dict of the model's arguments by name, not a {type(inputs).__qualname__}")
    loss = _loss(model(**inputs))
    if scaler is None or optimizer is None:
        loss.backward()
        return loss.detach(), False
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    overflow = not math.isfinite(float(model.calc_grad_norm()))
    scaler.update()
    return loss.detach(), overflow


def _loss(output: Any) -> Tensor:
    """Return the loss in what a model returns: the output itself, its `loss`, or its first entry."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.dim() != 0:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise UsageError(
            f"step needs a loss, and the model returns a {type(output).__qualname__}{shape} without one; let it return "
            "its loss, or {'loss': loss, ..}, or call the model and loss.backward()"
        )
    return found
