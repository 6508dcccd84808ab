"""What programs of several ranks compare with: the same training in one process, with the mean of all ranks' gradients.

Every rank plays it for itself. Doubles, so that nothing but the order of sums differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc

RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
CLOSE = 1e-9


def network(width: int = 8, depth: int = 4, seed: int = 0) -> nn.Sequential:
    """Equal on all ranks."""
    torch.manual_seed(seed)
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batches(step: int, rows: Sequence[int] | None = None, width: int = 8) -> list[torch.Tensor]:
    """One mini-batch for each rank."""
    made = torch.Generator().manual_seed(1000 + step)
    counts = rows if rows is not None else [4] * SIZE
    return [torch.randn(count, width, dtype=torch.float64, generator=made) for count in counts]


class Plain:
    """A model and its optimizer in one process."""

    def __init__(
        self, model: nn.Module, make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make(list(self.model.parameters())) if make is not None else None

    def gradients(self, losses: Sequence[Callable[[nn.Module], torch.Tensor]]) -> None:
        """Add the mean over ranks of the gradients of each rank's loss."""
        for loss in losses:
            (loss(self.model) / len(losses)).backward()

    def backward(self, given: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the usual loss."""
        self.gradients([lambda model, x=x: model(x).pow(2).sum() for x in given])


def same(mine: torch.Tensor | None, other: torch.Tensor | None, what: str) -> None:
    """Fail where two tensors differ."""
    if mine is None or other is None:
        assert mine is other, (what, mine, other)
        return
    mine, other = mine.detach(), other.detach()
    difference = float((mine.double() - other.double()).abs().max()) if mine.numel() else 0.0
    scale = max(float(other.abs().max()) if other.numel() else 1.0, 1e-3)
    assert difference <= CLOSE * scale, (what, difference)


def same_notes(
    mine: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]], within: float
) -> None:
    """Fail where what two trainings have noted is not the same values of the same names in the same order."""
    assert [what for what, _ in mine] == [what for what, _ in others]
    for place, ((what, found), (_, expected)) in enumerate(zip(mine, others, strict=True)):
        at = f"{what}, {place}: "
        torch.testing.assert_close(found, expected, rtol=within, atol=within, msg=lambda text, at=at: at + text)


def same_runs(
    mine: tuple[Sequence[tuple[str, torch.Tensor]], Mapping[str, Any]],
    others: tuple[Sequence[tuple[str, torch.Tensor]], Mapping[str, Any]],
    within: float,
) -> None:
    """Fail where two trainings with Lightning have noted or saved different values."""
    same_notes(mine[0], others[0], within)
    for name in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(mine[1][name], others[1][name], rtol=within, atol=within)


def same_parameters(wrapped: pyrannc.RaNNCModule, plain: nn.Module, what: str) -> None:
    """Values and gradients, on every rank. Collective."""
    for name, parameter in plain.named_parameters():
        same(wrapped.get_param(name), parameter.detach(), f"{what}: {name}")
        same(wrapped.get_param_grad(name), parameter.grad, f"{what}: gradient of {name}")


def train_alike(
    wrapped: pyrannc.RaNNCModule, optimizer: torch.optim.Optimizer, plain: Plain, rows: Sequence[int]
) -> None:
    """Three steps with the usual loss, of which each ends with the same gradients and parameters. Collective."""
    assert plain.optimizer is not None
    for step in range(3):
        given = batches(step, rows)
        for each in (optimizer, plain.optimizer):
            each.zero_grad()
        wrapped(given[RANK]).pow(2).sum().backward()
        plain.backward(given)
        same_parameters(wrapped, plain.model, f"step {step}")
        for each in (optimizer, plain.optimizer):
            each.step()


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    """Fail where a call does not raise an error that says so."""
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), str(caught.value)
