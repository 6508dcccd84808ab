"""Propagates overflowed gradients to all ranks, so that every rank's GradScaler skips the same steps.

A GradScaler checks the parameters of its own process only, which are those of one stage. If the scaler is passed to the
wrapper, under autocast to float16, or with float16 parameters, ranks compare after each reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

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
        found = not _finite(held)
        told = self._world.sum_numbers(torch.tensor([float(found)], dtype=torch.float64))
        if found or not told.item():
            return
        gradient = held[0] if held else self._spare()
        if gradient is not None and gradient.layout is torch.strided:
            gradient[(0,) * gradient.ndim] = float("inf")


def _finite(gradients: list[torch.Tensor]) -> bool:
    if not gradients:
        return True
    largest = torch._foreach_norm(gradients, float("inf"))
    return bool(torch.stack([norm.isfinite() for norm in largest]).all())
