"""Master weights in a world of one rank; tests/e2e/test_mixed_precision_jobs.py has others."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.runtime.optim.coupling import ELEMENTWISE
from rannd.runtime.zero.master_weights import MASTER, take_master


class Mean(nn.Module):
    """The mean of what a layer computes."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().mean()


@pytest.fixture(autouse=True)
def undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of microbatches would be added in another order than by hand."""
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_MASTER_WEIGHTS", "true")


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(_batch(number)).backward()
    optimizer.step()


@pytest.mark.parametrize("kept", [False, True])
def test_small_updates_are_lost_without_and_kept_with(kept: bool) -> None:
    model = Mean()
    nn.init.ones_(model.layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)  # 1 - 0.001 is 1 in bfloat16
    wrapped = pyrannc.RaNNCModule(model, optimizer, use_amp_master_params=kept)
    for number in range(20):
        _step(wrapped, optimizer, number)
    expected = 0.98 if kept else 1.0
    assert torch.equal(model.layer.bias, torch.full((5,), expected).bfloat16())


@pytest.mark.parametrize(
    ("name", "foreach"), [(name, number % 2 == 0) for number, name in enumerate(sorted(ELEMENTWISE))]
)
@pytest.mark.usefixtures("masters")
def test_each_optimizer_equals_masters_kept_by_hand(name: str, foreach: bool) -> None:
    settings: dict[str, Any] = {"lr": 1e-3, "foreach": foreach, **({"momentum": 0.9} if name == "SGD" else {})}
    kind = getattr(torch.optim, name)
    model, other = Mean(), Mean()
    optimizer = kind(model.parameters(), **settings)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    copies = [nn.Parameter(p.detach().float()) for p in other.parameters()]
    by_hand = kind(copies, **settings)
    for number in range(6):
        _step(wrapped, optimizer, number)
        other.zero_grad()
        other(_batch(number)).backward()
        for each, parameter in zip(copies, other.parameters(), strict=True):
            assert parameter.grad is not None
            each.grad = parameter.grad.float()
        by_hand.step()
        with torch.no_grad():
            for each, parameter in zip(copies, other.parameters(), strict=True):
                parameter.copy_(each)
    for each, parameter in zip(copies, model.parameters(), strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(state[MASTER], each)
        assert torch.equal(parameter, each.bfloat16())
        assert {key: value for key, value in state.items() if key != MASTER}.keys() == by_hand.state[each].keys()
        for key, value in by_hand.state[each].items():
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.usefixtures("masters")
def test_who_cannot_have_them_is_told() -> None:
    model = Mean()
    wrapped = pyrannc.RaNNCModule(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match=r"LBFGS cannot step master weights: .* leave master_weights out"):
        wrapped(_batch(0))
    with pytest.raises(UsageError, match=r"master_weights=true needs the optimizer .* RaNNCModule\(model, optimizer\)"):
        pyrannc.RaNNCModule(Mean())(_batch(0))
    assert pyrannc.RaNNCModule(Mean().requires_grad_(False))(_batch(0)).isfinite()
    wide = Mean(torch.float32)
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
    trained = pyrannc.RaNNCModule(wide, optimizer)
    trained(_batch(0).float()).backward()
    optimizer.step()
    assert not optimizer.state  # float32 parameters have no copies


@pytest.mark.usefixtures("masters")
def test_state_is_loaded_as_it_was_also_before_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    model = Mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    for number in range(3):
        _step(wrapped, optimizer, number)
    planned = wrapped.deployment.stages[0].estimate
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(value.nbytes for value in kept) == planned.optimizer_bytes
    assert 2 * sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == planned.grad_bytes
    saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(wrapped.state_dict())
    _step(wrapped, optimizer, 3)
    after = copy.deepcopy(optimizer.state_dict())

    again = Mean()
    other = torch.optim.Adam(again.parameters(), lr=1e-3)
    loaded = pyrannc.RaNNCModule(again, other)
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(values)
        other.load_state_dict(copy.deepcopy(saved))
    assert "master weights" not in caplog.text
    _step(loaded, other, 3)
    for number, state in after["state"].items():
        for key, value in state.items():
            assert torch.equal(other.state_dict()["state"][number][key], value), key

    without = {number: {k: v for k, v in each.items() if k != MASTER} for number, each in saved["state"].items()}
    with caplog.at_level(logging.WARNING):
        other.load_state_dict({**saved, "state": without})
        other.load_state_dict({**saved, "state": without})
    assert caplog.text.count("has no master weights: they begin with the values of the parameters") == 1
    assert all(other.state[p]["exp_avg"].dtype == torch.float32 for p in again.parameters())


def test_a_copy_follows_the_parameter_where_the_script_has_changed_it() -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    first = take_master(values, None, {})
    assert first.dtype == torch.float32
    with torch.no_grad():
        first.add_(1e-4)  # rounds to the same
    values[1] = 5.0
    state = {MASTER: first.data, "step": torch.tensor(1.0), "mean": torch.ones(3).bfloat16(), "none": None}
    second = take_master(values, first, state)
    assert second is first
    assert torch.equal(second, torch.tensor([1.0001, 5.0, 3.0001]))
    assert MASTER not in state
    assert state["mean"].dtype == torch.float32
    assert state["none"] is None
