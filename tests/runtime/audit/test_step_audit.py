"""Which step is audited, what is refused, and that nothing of it is left, in one process: a world of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyrannc
from rannd.errors import AuditError
from rannd.runtime.execution.stage import Computing

Log = pytest.LogCaptureFixture


class Counting(nn.Module):
    """Calls numpy's generator, so that it is one operator, which gives other results in each run."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class NoisyBackward(torch.autograd.Function):
    """Gives other gradients in each run: of its input, or of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of_input: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_input = of_input
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        noise = 1.0 + float(np.random.rand())
        of_input, of_weight = (noise, 1.0) if ctx.of_input else (1.0, noise)
        return grad * weight * of_input, (grad * x).sum(0) * of_weight, None


class Noisy(nn.Module):
    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.weight, self.of_input = nn.Parameter(torch.ones(6)), of_input

    def forward(self, x: Tensor) -> Tensor:
        return NoisyBackward.apply(x, self.weight, self.of_input)


class Network(nn.Module):
    """Layers with dropout and BatchNorm, and a loss if there is a target."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), *more, nn.Linear(6, 6))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        found: Tensor = self.body(x)
        return found if target is None else nn.functional.mse_loss(found, target)


def wrapped(monkeypatch: pytest.MonkeyPatch, *more: nn.Module, step: int = 2, **items: str) -> pyrannc.RaNNCModule:
    monkeypatch.setenv("RANNC_VERIFY_STEP", str(step))
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    for name, value in items.items():
        monkeypatch.setenv(f"RANNC_{name.upper()}", value)
    torch.manual_seed(0)
    inner = Network(*more)
    return pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))


def train(model: pyrannc.RaNNCModule, steps: int, *, inside: bool = True, scale: float = 1.0) -> list[Tensor]:
    """Steps; returns the gradients of the last one, and all that may have changed beside."""
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        x = torch.randn(4, 6)
        loss = model(x, x) if inside else model(x).pow(2).mean()
        (loss * scale).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(each.clone() for each in model.buffers()), torch.get_rng_state()]


def test_one_step_is_audited_and_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    model = wrapped(monkeypatch, step=3)
    random.seed(1)
    np.random.seed(1)
    audited = train(model, 3)
    drawn = random.random(), np.random.rand()
    assert [line for line in caplog.messages if "equals its replay" in line] == [
        line for line in caplog.messages if line.startswith("Step 3 equals its replay: ")
    ]
    assert model._session.audits.audited
    pyrannc.clear()
    model = wrapped(monkeypatch, step=0)
    random.seed(1)
    np.random.seed(1)
    plain = train(model, 3)
    assert all(torch.equal(one, other) for one, other in zip(audited, plain, strict=True))
    assert drawn == (random.random(), np.random.rand())


@pytest.mark.parametrize("inside", [True, False])
def test_a_scaled_loss_and_gradients_that_are_there_already(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    model = wrapped(monkeypatch)
    model.zero_grad = lambda *_: None  # type: ignore[method-assign]
    train(model, 2, inside=inside, scale=0.25)
    assert model._session.audits.audited


def test_hooks_of_parameters_may_change_what_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(monkeypatch)
    next(iter(model.parameters())).register_hook(lambda gradient: gradient * 7)
    train(model, 2)
    assert model._session.audits.audited


def test_evaluation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(monkeypatch)
    train(model, 1)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 6))
    model.train()
    assert not model._session.audits.audited
    train(model, 1)
    assert model._session.audits.audited


def _delayed(model: pyrannc.RaNNCModule) -> None:
    pyrannc.delay_grad_allreduce(True)
    try:
        train(model, 1)
    finally:
        pyrannc.delay_grad_allreduce(False)
    model.allreduce_grads()


def _asked(model: pyrannc.RaNNCModule) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    torch.autograd.grad(model(x, x.detach()), x)


def _stepping(model: pyrannc.RaNNCModule) -> None:
    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad)

    hooks = [each.register_post_accumulate_grad_hook(step) for each in model.parameters()]
    train(model, 1)
    for each in hooks:
        each.remove()


def _without_backward(model: pyrannc.RaNNCModule) -> None:
    x = torch.randn(4, 6)
    model(x, x)
    train(model, 1)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (_delayed, "wait for a later reduction (no_sync, delay_grad_allreduce)"),
        (_asked, "its backward was asked for some gradients only"),
        (_stepping, "body.0.weight has other values than in its forward: does a hook step an optimizer in backward?"),
        (_without_backward, "the script has not called backward before its next call"),
    ],
)
def test_what_cannot_be_audited_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: Log, second: Callable[[pyrannc.RaNNCModule], None], why: str
) -> None:
    model = wrapped(monkeypatch)
    train(model, 1)
    second(model)
    (line,) = [each for each in caplog.messages if each.startswith("verify_step: step 2 was not audited: ")]
    assert why in line
    assert not model._session.audits.audited
    train(model, 1)


@pytest.mark.parametrize("noisy", [Counting(), Noisy(True), Noisy(False)], ids=["forward", "inputs", "parameters"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_block_that_cannot_be_repeated_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: Log, noisy: nn.Module, inside: bool
) -> None:
    model = wrapped(monkeypatch, noisy)
    train(model, 2, inside=inside)
    assert [line for line in caplog.messages if "gives other results in each run" in line]
    (told,) = [line for line in caplog.messages if line.startswith("Step 2 ")]
    audited, blocks = (int(number) for number in re.findall(r"(\d+) of (\d+) blocks", told)[0])
    assert audited < blocks
    assert ("equals its replay" in told) == (audited > 0)
    assert model._session.audits.audited


class Failing(Counting):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError(self.fails)
        return super().forward(x)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("this was once", r"could not be replayed on rank 0: .*this was once"),
        (
            "can't allocate memory",
            r"could not be replayed on rank 0 \(a smaller mini-batch may fit\): .*allocate",
        ),
    ],
)
def test_an_error_in_the_replay_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, fails: str, told: str) -> None:
    model = wrapped(monkeypatch, Failing())
    train(model, 1)
    x = torch.randn(4, 6)
    loss = model(x).pow(2).mean()
    monkeypatch.setattr(Failing, "fails", fails)
    with pytest.raises(AuditError, match=f"step 2 {told}.* without verify_step .*training goes on") as caught:
        loss.backward()
    assert isinstance(caught.value.__cause__, Exception)
    monkeypatch.setattr(Failing, "fails", "")
    train(model, 1)


def test_numbers_of_numpy_are_drawn_again_where_a_block_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those of what forward has computed, and the script's generator goes on as without."""
    found: list[tuple[list[Tensor], float]] = []
    for checkpointing in ("false", "true"):
        model = wrapped(monkeypatch, Counting(), checkpointing=checkpointing, verify_recomp="true", step=0)
        np.random.seed(1)
        found.append((train(model, 2), np.random.rand()))
        pyrannc.clear()
    (plain, drawn), (again, drawn_then) = found
    assert drawn == drawn_then
    torch.testing.assert_close(again, plain)


def _within(model: pyrannc.RaNNCModule) -> None:
    loss = model(torch.randn(4, 6)).pow(2).mean()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


def _outside(model: pyrannc.RaNNCModule) -> None:
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, x)
    loss.backward()


def _inside_and_within(model: pyrannc.RaNNCModule) -> None:
    x = torch.randn(4, 6)
    loss = model(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


@pytest.mark.parametrize("step", [_within, _outside, _inside_and_within])
def test_backward_is_replayed_under_autocast_as_it_ran(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[pyrannc.RaNNCModule], None]
) -> None:
    model = wrapped(monkeypatch, *(nn.Linear(6, 6) for _ in range(4)), step=1)
    step(model)
    assert model._session.audits.audited


def test_values_that_are_nan_are_told(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    model = wrapped(monkeypatch, check_nan="off")
    train(model, 1)
    x = torch.full((4, 6), float("nan"))
    model(x, x).backward()
    assert [line for line in caplog.messages if "computes NaN; what is NaN on both sides counts as equal" in line]


def test_nothing_is_kept_of_a_step_that_is_done_or_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(monkeypatch, step=1)
    loss = model(torch.randn(4, 6)).sum()
    audit = model._session.audits._last
    assert audit is not None
    assert audit.record.used
    loss.backward(retain_graph=True)
    assert audit.equal
    loss.backward()
    given_up = wrapped(monkeypatch, step=1)
    _without_backward(given_up)
    for each in (audit, given_up._session.audits._last):
        assert each is not None
        assert each.record.find(("leaf", 0)) == each.record.find(("entered", 0, 0)) == each.record.used == {}


def test_recomputed_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal, with dropout; and not if a random operator begins anywhere else."""
    model = wrapped(monkeypatch, checkpointing="true", verify_recomp="true")
    train(model, 2)
    assert model._session.audits.audited
    original, turns = Computing._random, iter(range(100))
    monkeypatch.setattr(Computing, "_random", lambda self, step, piece, _: original(self, step, next(turns), None))
    with pytest.raises(
        AuditError, match=r"verify_recomp: value \w+ of .* when it is recomputed, in stage 0, segment \d"
    ):
        train(model, 1)
