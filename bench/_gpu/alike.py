"""Training a wrapped model and the same model in eager PyTorch, and how far they are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from _gpu.models import loss_of, on

CLOSE = 1e-9
"""Largest relative difference of float64 results: sums in another order."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a large eps: where gradients are tiny, an update would be the sign of rounding errors."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference of two tensors, relative to the largest value."""
    if mine.shape != theirs.shape:
        return float("inf")
    mine, theirs = mine.detach().to("cpu", torch.float64), theirs.detach().to("cpu", torch.float64)
    if not mine.numel():
        return 0.0
    worst = float((mine - theirs).abs().max() / max(float(theirs.abs().max()), 1e-3))
    return worst if worst == worst else float("inf")


def gradients(model: nn.Module) -> Tensor:
    """All gradients of a model, in its order, in float64 on the CPU."""
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([each.detach().to("cpu", torch.float64).flatten() for each in found])


def relative_error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is right."""
    return float((found - right).norm() / right.norm())


class Pair:
    """A model that is wrapped, and its copy in eager PyTorch on the device.

    Args:
        model: On the CPU; taken over.
        make: Makes the optimizer of each.
        device: Where both compute.
        moved: Whether the model is moved to the device before it is wrapped.
        around: Context in which each side's forward runs.
        options: Further arguments of RaNNCModule.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        device: torch.device,
        *,
        moved: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> None:
        import pyrannc

        self.device, self._around = device, around
        self.eager = copy.deepcopy(model).to(device)
        self.inner = model.to(device) if moved else model
        self.theirs, self.mine = make(self.eager.parameters()), make(self.inner.parameters())
        self.wrapped = pyrannc.RaNNCModule(self.inner, self.mine, **options)

    def call(self, batch: dict[str, Tensor], *, inputs: torch.device | None = None) -> float:
        """Forward and backward of both, from the same gradients on; returns the distance of outputs and gradients."""
        with self._around():
            mine = self.wrapped(**on(batch, inputs or self.device))
            theirs = self.eager(**on(batch, self.device))
        worst = self._outputs(mine, theirs)
        loss_of(mine).backward()
        loss_of(theirs).backward()
        return max(worst, *self._state())

    def step(self, batch: dict[str, Tensor], *, inputs: torch.device | None = None) -> float:
        """A whole step of both; returns the largest distance."""
        for each in (self.mine, self.theirs):
            each.zero_grad()
        worst = self.call(batch, inputs=inputs)
        for each in (self.mine, self.theirs):
            each.step()
        return max(worst, *self._state())

    def evaluate(self, batch: dict[str, Tensor]) -> float:
        """A forward of both in evaluation mode, without gradients; returns the distance of the outputs."""
        for each in (self.wrapped, self.eager):
            each.eval()
        with torch.no_grad(), self._around():
            mine, theirs = self.wrapped(**on(batch, self.device)), self.eager(**on(batch, self.device))
        for each in (self.wrapped, self.eager):
            each.train()
        return self._outputs(mine, theirs)

    def _outputs(self, mine: Any, theirs: Any) -> float:
        pairs = [(mine, theirs)] if isinstance(mine, Tensor) else [(mine[key], theirs[key]) for key in theirs]
        return max(distance(*pair) for pair in pairs)

    def _state(self) -> Iterator[float]:
        """Distances of parameters, gradients and buffers."""
        for (name, mine), theirs in zip(self.inner.named_parameters(), self.eager.parameters(), strict=True):
            yield distance(mine, theirs)
            if (mine.grad is None) != (theirs.grad is None):
                raise AssertionError(f"{name}: gradient is None on one side alone")
            if mine.grad is not None and theirs.grad is not None:
                yield distance(mine.grad, theirs.grad)
        for mine, theirs in zip(self.inner.buffers(), self.eager.buffers(), strict=True):
            yield distance(mine, theirs)


def worst_of(pair: Pair, batches: Sequence[dict[str, Tensor]], inputs: torch.device | None = None) -> float:
    """Largest distance over the steps of some mini-batches."""
    return max(pair.step(batch, inputs=inputs) for batch in batches)
