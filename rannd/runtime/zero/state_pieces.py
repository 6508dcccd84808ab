"""An optimizer's state of a piece of a parameter, and of the whole parameter.

What an optimizer that treats each element by itself keeps for a parameter is a tensor of the parameter's shape (a
moment), or something that does not depend on the shape (a number of steps). The first is divided as the parameter is.
Of a parameter without dimensions the two cannot be told apart: it is never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rannd.runtime.zero.division import Piece


def cut(state: Any, shape: torch.Size, piece: Piece) -> Any:
    """The state of a piece, of that of a parameter of `shape`; tensors that are divided are copies."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != shape:
            return tensor
        return tensor.detach().reshape(-1)[piece.start : piece.stop].clone()

    return _mapped([state], lambda found: part(found[0]))


def is_part(tensor: torch.Tensor, piece: Piece) -> bool:
    """Whether a tensor in the state of a piece is a part of one of the whole parameter."""
    return tuple(tensor.shape) == (piece.size,)


def join(states: Sequence[tuple[Piece, Any]], shape: Sequence[int]) -> Any:
    """The state of a parameter of `shape`, of those of its pieces. ValueError if they are not alike, or not all."""
    ordered = sorted(states, key=lambda each: each[0])
    ends = [0, *(piece.stop for piece, _ in ordered)]
    if [piece.start for piece, _ in ordered] != ends[:-1] or ends[-1] != torch.Size(shape).numel():
        raise ValueError(f"the pieces {[tuple(piece) for piece, _ in ordered]} do not make up a parameter of {shape}")

    def whole(found: Sequence[torch.Tensor]) -> torch.Tensor:
        if not all(is_part(tensor, piece) for tensor, (piece, _) in zip(found, ordered, strict=True)):
            return found[0]
        return torch.cat(list(found)).view(torch.Size(shape))

    return _mapped([state for _, state in ordered], whole)


def _mapped(states: Sequence[Any], new: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    """The first of nested states that are alike, with `new(the tensors there)` in place of each tensor."""
    first = states[0]
    if any(type(each) is not type(first) for each in states):
        raise ValueError(f"they are {sorted({type(each).__name__ for each in states})}")
    if isinstance(first, torch.Tensor):
        return new(states)
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in states):
            raise ValueError(f"one has {sorted(map(str, first))}, another other entries")
        return {key: _mapped([each[key] for each in states], new) for key in first}
    if type(first) in (list, tuple):
        return type(first)(_mapped(each, new) for each in zip(*states, strict=True))
    return first
