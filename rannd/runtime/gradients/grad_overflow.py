"""A gradient that overflows on one rank is one on every rank, so that each rank's GradScaler skips the same steps.

A GradScaler looks at the parameters of its own process, which are those of one stage. With the scaler given to the
wrapper, under autocast to float16, and with parameters in float16, ranks compare after each reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rannd.runtime.comm.world import World


class Overflow:
    """Spreads what is not finite over the ranks of a deployment of several stages.

    `spare()`: a gradient of a rank that trains nothing, or None.
    """

    def __init__(self, world: World, spare: Callable[[], torch.Tensor | None]) -> None:
        self._world = world
        self._spare = spare
        self.watched = False
        """Whether gradients may overflow; alike on all ranks."""

    def spread(self, gradients: Iterable[torch.Tensor]) -> None:
        """Write inf into one of this rank's reduced gradients, where another rank has what is not finite. Collective.

        Nothing happens where it is not `watched`.
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
