"""An optimizer's whole state has the form of a single process's, for every class, and loads there and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import UsageError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "listed": lambda p: Listed(p),
}


class Listed(torch.optim.Optimizer):
    """Its state: lists, tuples, dicts and None of a parameter, a counter of its own, another entry of its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "name": "listed", "window": (1, 2)})
        self.rounds = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rounds += 1
        self.state["counter"] = {"n": self.rounds}  # type: ignore[index]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["history"] = [*state.get("history", [])[-1:], p.grad.clone()]
                    state["pair"] = (p.grad.mean(), {"deep": p.grad * 2})
                    state["what"] = None if self.rounds == 1 else 2.5
                    p.data.add_(p.grad, alpha=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict["rounds"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "rounds"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(2, 2)
        self.one.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.ndim == 2]},
        {"params": [p for p in named.values() if p.ndim == 1]},
    ]


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two states are equal; sums of the same numbers in two places of memory differ in the last bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=tolerance, atol=tolerance / 100)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(*each, tolerance) for each in zip(one, other, strict=True))
        )
    return bool(one == other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_one_process(name: str) -> None:
    plain = Net().double()
    inner = copy.deepcopy(plain)
    single, mine = (OPTIMIZERS[name](groups(each)) for each in (plain, inner))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (single, mine)]
    model = pyrannc.RaNNCModule(inner, mine)
    assert same(mine.state_dict(from_global=True), single.state_dict())

    def step() -> None:
        x = torch.randn(8, 4, dtype=torch.float64)
        for run, optimizer, schedule in zip((plain, model), (single, mine), schedules, strict=True):
            optimizer.zero_grad()
            run(x).pow(2).mean().backward()
            optimizer.step()
            schedule.step()

    step()
    step()
    whole = mine.state_dict(from_global=True)
    assert same(mine.state_dict(), single.state_dict(), 1e-10)
    assert same(whole, mine.state_dict())
    assert [key for key in whole["state"] if key != "counter"] == [
        k for k in single.state_dict()["state"] if k != "counter"
    ]
    assert all(v.device.type == "cpu" for s in whole["state"].values() for v in s.values() if torch.is_tensor(v))
    fresh = OPTIMIZERS[name](groups(Net().double()))
    fresh.load_state_dict(copy.deepcopy(whole))  # into one process ...
    assert same(fresh.state_dict(), whole)
    kept = copy.deepcopy(single.state_dict())
    step()
    mine.load_state_dict(kept, from_global=True)  # ... and back
    assert same(mine.state_dict(from_global=True), kept)


def test_states_are_copies() -> None:
    inner = Net()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = pyrannc.RaNNCModule(inner, optimizer)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    whole = optimizer.state_dict(from_global=True)
    before = copy.deepcopy(whole)
    optimizer.step()
    assert same(whole, before)
    assert not same(optimizer.state_dict(from_global=True), before)


def test_named_parameters_and_groups_that_come_later() -> None:
    plain, inner = Net(), Net()
    single, mine = (torch.optim.AdamW(list(each.one.named_parameters())) for each in (plain, inner))
    model = pyrannc.RaNNCModule(inner, mine)
    model(torch.randn(2, 4)).sum().backward()
    mine.step()
    for each, run in ((single, plain), (mine, inner)):
        each.add_param_group({"params": list(run.two.named_parameters()), "lr": 0.5})
    whole = mine.state_dict(from_global=True)
    assert whole["param_groups"] == single.state_dict()["param_groups"]
    assert [len(group["param_names"]) for group in whole["param_groups"]] == [2, 2]
    mine.load_state_dict(whole, from_global=True)
    model(torch.randn(2, 4)).sum().backward()
    mine.step()
    assert set(mine.state_dict(from_global=True)["state"]) == {0, 2, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["param_groups"].pop(), r"groups of \[6\].*, the optimizer of \[6, 0\]|groups of \[3\]"),
        (lambda state: state["param_groups"][0]["params"].pop(), r"groups of \[2, 3\] parameters, the optimizer of"),
        (lambda state: state.clear(), "give every rank the whole state"),
    ],
)
def test_a_state_of_other_groups_is_refused(change: Callable[[Any], object], message: str) -> None:
    inner = Net()
    optimizer = torch.optim.SGD(groups(inner), lr=0.1, momentum=0.9)
    pyrannc.RaNNCModule(inner, optimizer)(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict(from_global=True)
    state = copy.deepcopy(before)
    change(state)
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(state, from_global=True)
    assert same(optimizer.state_dict(from_global=True), before)


def test_what_cannot_be_sent_and_groups_changed_by_hand() -> None:
    inner = Net()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = pyrannc.RaNNCModule(inner, optimizer)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.state[inner.two.bias]["object"] = object()
    with pytest.raises(UsageError, match=r"\['object'\] is a builtins.object"):
        optimizer.state_dict(from_global=True)
    del optimizer.state[inner.two.bias]["object"]
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UsageError, match="changed by hand"):
        optimizer.state_dict(from_global=True)


def test_lbfgs_works_where_every_rank_has_everything() -> None:
    inner = nn.Linear(4, 4).double()
    optimizer = torch.optim.LBFGS(inner.parameters())
    model = pyrannc.RaNNCModule(inner, optimizer)
    x = torch.randn(8, 4, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    first = optimizer.step(closure).item()
    assert closure().item() < first
    state = optimizer.state_dict(from_global=True)
    assert state["state"][0]["n_iter"] > 0
    optimizer.load_state_dict(state, from_global=True)
    assert same(optimizer.state_dict(from_global=True), state)


def test_an_optimizer_whose_parameters_were_replaced_is_refused() -> None:
    inner = nn.Linear(4, 4)
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    model.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
    with pytest.raises(UsageError, match="none of the model's parameters any more"):
        model(torch.randn(2, 4))
