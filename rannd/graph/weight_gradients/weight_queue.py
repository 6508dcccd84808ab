"""What the gradients of parameters are computed from later: the queue between the two halves of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Delayed(NamedTuple):
    """Gradients of the parameters of one operator that are still to be computed."""

    group: int
    """Operators of one group share parameters, whose gradients are added up before anybody hears of them."""
    read: Sequence[Tensor]
    """The parameters as the operator read them: themselves, or views and casts of them."""
    gradients: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]
    """Computes the gradient of each of `read`, and adds it to the one that is given, in place; None: to nothing. Holds
    what that needs."""


class WeightQueue:
    """Gradients of the parameters of one piece in one segment, in the order in which its backward met the operators."""

    def __init__(self) -> None:
        self._waiting: list[Delayed] = []

    def add(self, delayed: Delayed) -> None:
        """Called in the first half of the backward."""
        self._waiting.append(delayed)

    def __len__(self) -> int:
        return len(self._waiting)

    def accumulate(self, arrived: Callable[[Tensor], None]) -> None:
        """Compute all gradients and accumulate them, group by group; what they were computed from is let go at once.

        Products add directly to what is there, which saves a pass over the gradient. For views and casts of parameters,
        and for parameters whose gradients have another type (master weights), autograd's engine does the rest, and
        calls the parameters' post-accumulate hooks; of all others `arrived` is told, once.
        """
        groups: dict[int, list[Delayed]] = {}
        for each in self._waiting:
            groups.setdefault(each.group, []).append(each)
        self._waiting.clear()
        for same in groups.values():
            if all(tensor.is_leaf and tensor.grad_dtype == tensor.dtype for each in same for tensor in each.read):
                _accumulate(same, arrived)
            else:
                _differentiate(same)


def _accumulate(same: list[Delayed], arrived: Callable[[Tensor], None]) -> None:
    """Accumulate the gradients of a group of parameters, and empty the list."""
    told: dict[int, Tensor] = {}
    while same:
        each = same.pop(0)
        with torch.no_grad():
            found = each.gradients([parameter.grad for parameter in each.read])
            for parameter, gradient in zip(each.read, found, strict=True):
                told[id(parameter)] = parameter
                if parameter.grad is None:
                    alike = gradient.stride() == parameter.stride()
                    parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
    for parameter in told.values():
        arrived(parameter)


def _differentiate(same: list[Delayed]) -> None:
    """Accumulate the gradients of a group of parameters of which views or casts were read, and empty the list."""
    read: list[Tensor] = []
    found: list[Tensor] = []
    while same:
        each = same.pop(0)
        with torch.no_grad():
            found += each.gradients([None] * len(each.read))
        read += each.read
    torch.autograd.backward(read, found)
