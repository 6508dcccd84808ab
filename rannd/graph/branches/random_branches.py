"""Detect branches on a random number (`if torch.rand([]) < p:`, as in LayerDrop).

The condition compares a number drawn from [0, 1) with a constant, so it depends on no data. If the constant is outside
of [0, 1], the outcome is certain; otherwise the graph has to contain both sides of the branch (`branch_selection.py`).
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
    """The outcome during tracing, once a branch has used it."""

    @property
    def certain(self) -> bool | None:
        """The outcome if it is always the same, None otherwise."""
        if self.comparison == "<":
            return False if self.limit <= 0 else True if self.limit >= 1 else None
        if self.comparison == "<=":
            return False if self.limit < 0 else True if self.limit >= 1 else None
        if self.comparison == ">":
            return True if self.limit < 0 else False if self.limit >= 1 else None
        return True if self.limit <= 0 else False if self.limit >= 1 else None


class Draws:
    """Random scalars that traced code draws, and their comparisons with constants."""

    def __init__(self) -> None:
        self._drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._chances: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def follow(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Record the result of a torch function if it is a random scalar or a comparison of one."""
        name = getattr(function, "__name__", "")
        if name == "rand" and _is_one(result):
            self._drawn[result] = True
        elif name in _COMPARISONS and len(args) == 2 and self._is_drawn(args[0]) and type(args[1]) in (int, float):
            self._chances[result] = Chance(_COMPARISONS[name], float(args[1]))

    def _is_drawn(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._drawn

    def chance(self, tensor: object) -> Chance | None:
        """The Chance of a tensor that compares a random number with a constant, None for other tensors."""
        found: Chance | None = self._chances.get(tensor) if isinstance(tensor, torch.Tensor) else None
        return found


def _is_one(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0
