"""Propagates overflowed gradients to all ranks, so that every rank's GradScaler skips the same steps.

A GradScaler checks the parameters of its own process only, which are those of one stage. If the scaler is passed to the
wrapper, under autocast to float16, or with float16 parameters, ranks compare after each reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rannd.device.reads import read
from rannd.runtime.comm.world import World


class Overflow:
    """Propagates infinite or NaN gradients over the ranks of a deployment with several stages.

    `spare()` returns the placeholder gradient of a rank that has no trainable parameters, or None.
    """

    def __init__(self, world: World, spare: Callable[[], torch.Tensor | None]) -> None:
        self._world = world
        self._spare = spare
        self.watched = False
        """Whether gradients may overflow; the same on all ranks."""

    def spread(self, gradients: Iterable[torch.Tensor]) -> None:
        """Write inf into one of this rank's reduced gradients if another rank has an infinite or NaN one. Collective.

        No-op if not `watched`.
        """
        if not self.watched:
            return
        held = [gradient for gradient in gradients if gradient.numel()]
        gradient = held[0] if held else self._spare()
        found = _overflowed(held, self._world.device)
        if self._world.reads.late:
            elsewhere = (self._world.share_values(found.reshape(1)).sum() > 0) & (found == 0)
        else:
            here = float(read(found))
            told = self._world.sum_numbers(torch.tensor([here], dtype=torch.float64))
            if here or not told.item():
                return
            elsewhere = torch.ones((), dtype=torch.bool, device=self._world.device)
        if gradient is not None and gradient.layout is torch.strided:
            first = gradient[(0,) * gradient.ndim]
            first.copy_(torch.where(elsewhere.to(first.device), float("inf"), first))


def _overflowed(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1 if a gradient is infinite or NaN, else 0: float64 on the device."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    largest = torch._foreach_norm(gradients, float("inf"))
    return (~torch.stack([norm.isfinite() for norm in largest]).all()).double()
