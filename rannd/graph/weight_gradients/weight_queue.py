"""What the gradients of parameters are computed from later: the queue between the two halves of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Delayed(NamedTuple):
    """Gradients of the parameters of one operator that are still to be computed."""

    group: int
    """Operators of one group share parameters, whose gradients are added up before they are accumulated."""
    read: Sequence[Tensor]
    """The parameters as the operator read them: themselves, or views and casts of them."""
    gradients: Callable[[], Sequence[Tensor]]
    """Computes the gradient of each of `read`; holds what that needs."""


class WeightQueue:
    """Gradients of the parameters of one piece in one segment, in the order in which its backward met the operators."""

    def __init__(self) -> None:
        self._waiting: list[Delayed] = []

    def add(self, delayed: Delayed) -> None:
        """Called in the first half of the backward."""
        self._waiting.append(delayed)

    def __len__(self) -> int:
        return len(self._waiting)

    def accumulate(self) -> None:
        """Compute all gradients and accumulate them, group by group; what they were computed from is let go at once.

        Autograd's engine does the rest: it goes back through views and casts, adds up the gradients of one parameter,
        and calls its post-accumulate hooks once.
        """
        groups: dict[int, list[Delayed]] = {}
        for each in self._waiting:
            groups.setdefault(each.group, []).append(each)
        self._waiting.clear()
        for same in groups.values():
            read: list[Tensor] = []
            found: list[Tensor] = []
            while same:
                each = same.pop(0)
                read += each.read
                found += each.gradients()
            torch.autograd.backward(read, found)
