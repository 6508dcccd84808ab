"""Names of what the code of a model's `forward` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rannd.graph.modules.methods import called_in_forward, is_own_method


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return function(*args)

    return run


def forward_that_reads(value: int | None) -> Callable[..., Any]:
    """Without a value, the variable that it reads has none either."""
    if value is not None:
        known = value

    def forward(self: Any, x: torch.Tensor) -> Any:
        return known if x is None else self.part(x)

    return forward


class Model(nn.Module):
    forward = forward_that_reads(None)

    @decorated
    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def dump(self, path: str) -> None:
        raise AssertionError(path)


def test_what_forward_calls_through_decorations_and_methods() -> None:
    called = called_in_forward(Model())
    assert {"part", "inner"} <= called
    assert "dump" not in called
    assert is_own_method(Model(), "dump")
    assert not is_own_method(Model(), "state_dict")
