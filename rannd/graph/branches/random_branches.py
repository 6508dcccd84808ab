"""Branches on a random number (`if torch.rand([]) < p:`, as layers are dropped at random).

A number drawn from [0, 1) that is compared with a constant decides without any data. Where the constant is outside of
[0, 1] the outcome is known; otherwise it is a *chance*, and both ways have to be in the graph (selection.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_COMPARISONS = {
    "__lt__": "<", "lt": "<", "less": "<", "__le__": "<=", "le": "<=", "less_equal": "<=",
    "__gt__": ">", "gt": ">", "greater": ">", "__ge__": ">=", "ge": ">=", "greater_equal": ">=",
}  # fmt: skip


@dataclass
class Chance:
    """A random number compared with `limit`."""

    comparison: str
    limit: float
    outcome: bool | None = None
    """The way that tracing went, once a branch has asked."""

    @property
    def certain(self) -> bool | None:
        """The outcome where it is always the same."""
        if self.comparison == "<":
            return False if self.limit <= 0 else True if self.limit >= 1 else None
        if self.comparison == "<=":
            return False if self.limit < 0 else True if self.limit >= 1 else None
        if self.comparison == ">":
            return True if self.limit < 0 else False if self.limit >= 1 else None
        return True if self.limit <= 0 else False if self.limit >= 1 else None


class Draws:
    """The random numbers that traced code draws one at a time."""

    def __init__(self) -> None:
        self._drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._chances: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def follow(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Take note of what a function of torch's has made."""
        name = getattr(function, "__name__", "")
        if name == "rand" and _is_one(result):
            self._drawn[result] = True
        elif name in _COMPARISONS and len(args) == 2 and self._is_drawn(args[0]) and type(args[1]) in (int, float):
            self._chances[result] = Chance(_COMPARISONS[name], float(args[1]))

    def _is_drawn(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._drawn

    def chance(self, tensor: object) -> Chance | None:
        """What a tensor is, where it is a random number compared with a constant."""
        found: Chance | None = self._chances.get(tensor) if isinstance(tensor, torch.Tensor) else None
        return found


def _is_one(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0
