"""Optimizers whose update of one parameter depends on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.runtime.optim.coupling import Untried, couples


class Each(torch.optim.Optimizer):
    """Lion: each parameter by itself, with state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_((0.9 * mean + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    mean.lerp_(p.grad, 0.01)


class GlobalNorm(Each):
    """As Lamb with a largest norm: divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"]]  # all have gradients, as many assume
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.sub_(0.1 * p.grad / norm)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, which it shares its groups with."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.base.step()


class Sam(Each):
    def step(self, closure: Callable[[], float] | None = None) -> None:
        raise RuntimeError("use first_step and second_step")


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(9, 5)), nn.Parameter(torch.randn(9))]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, Each])
def test_each_parameter_by_itself(kind: Any) -> None:
    assert not couples(kind(parameters(), lr=0.1))


def test_all_parameters_at_once() -> None:
    assert couples(torch.optim.LBFGS(parameters()))
    assert couples(type("Mine", (torch.optim.LBFGS,), {})(parameters()))
    assert couples(GlobalNorm(parameters()))


@pytest.mark.parametrize("inner", [Each, GlobalNorm])
def test_a_wrapped_optimizer_is_tried_and_left_as_it_is(inner: Any) -> None:
    given = parameters()
    base = inner(given)
    optimizer = Lookahead(base)
    for p in given:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    held = [p.detach().clone() for p in given], {p: dict(state) for p, state in base.state.items()}
    drawn = torch.get_rng_state()
    assert couples(optimizer) == (inner is GlobalNorm)
    assert all(torch.equal(p, before) for p, before in zip(given, held[0], strict=True))
    assert {p: dict(state) for p, state in base.state.items()} == held[1]
    assert torch.equal(torch.get_rng_state(), drawn)


def test_what_cannot_be_tried_is_told() -> None:
    with pytest.raises(Untried, match="RuntimeError: use first_step and second_step"):
        couples(Sam(parameters()))


@pytest.mark.parametrize("kind", [Each, GlobalNorm])
def test_the_optimizer_of_a_wrapped_model_is_tried(kind: Any) -> None:
    """RaNNCModule has put calls of its own, which cannot be copied, in place of the optimizer's methods."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = kind(inner.parameters())
    model = pyrannc.RaNNCModule(inner, optimizer)
    model(torch.randn(2, 4)).sum().backward()
    assert couples(optimizer) == (kind is GlobalNorm)
