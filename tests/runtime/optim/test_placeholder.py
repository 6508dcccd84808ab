"""A rank without anything to train: every optimizer of torch steps, and no state shows why."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from rannd.runtime.gradients import grad_norm
from rannd.runtime.optim.placeholder import add_placeholder, is_placeholder, without_placeholder

CLASSES = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
WAYS = [
    (kind, way)
    for kind in CLASSES
    for way in ("", "foreach", "fused")
    if not way or way in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_every_optimizer_steps_and_hides_it(kind: type[torch.optim.Optimizer], way: str) -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(1 if kind is torch.optim.LBFGS else 2)]
    groups: Any = [{"params": [parameter]} for parameter in parameters]
    options: dict[str, Any] = {"lr": 0.1, **({way: True} if way else {})}
    optimizer = kind(groups, **options)  # type: ignore[call-arg]
    for group in optimizer.param_groups:
        group["params"].clear()
    optimizer.state.clear()
    add_placeholder(optimizer, torch.device("cpu"))
    closure = (lambda: 0.0) if kind is torch.optim.LBFGS else None
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step(closure)  # type: ignore[arg-type]
        state = optimizer.state_dict()
        assert [group["params"] for group in state["param_groups"]] == [[] for _ in parameters]
        assert kind is torch.optim.LBFGS or not state["state"]
        optimizer.load_state_dict(copy.deepcopy(state))
    (placeholder,) = optimizer.param_groups[0]["params"]
    assert is_placeholder(placeholder)
    assert not placeholder.detach().any()
    if kind not in (torch.optim.LBFGS, torch.optim.SparseAdam):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()


def test_states_of_other_parameters_keep_their_numbers() -> None:
    frozen, later = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": [frozen]}, {"params": [later]}], lr=0.1)
    add_placeholder(optimizer, torch.device("cpu"))
    later.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    assert list(state["state"]) == [1]
    before = optimizer.state[later]["exp_avg"].clone()
    optimizer.load_state_dict(copy.deepcopy(state))
    assert torch.equal(optimizer.state[later]["exp_avg"], before)
    plain = torch.optim.Adam([{"params": [frozen]}, {"params": [later]}], lr=0.1)
    plain.load_state_dict(state)


def test_what_is_written_to_its_gradient_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2), requires_grad=False)], lr=0.1)
    add_placeholder(optimizer, torch.device("cpu"))
    placeholder = optimizer.param_groups[0]["params"][-1]
    placeholder.grad.fill_(torch.inf)
    assert placeholder.grad.isinf().all()
    optimizer.zero_grad()
    assert not placeholder.grad.any()


def test_names_of_parameters_and_norms_do_not_know_it() -> None:
    linear = nn.Linear(2, 2)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.Adam([("frozen", frozen)], lr=0.1)
    add_placeholder(optimizer, torch.device("cpu"))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == ["frozen"]
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.step()
    placeholder = optimizer.param_groups[0]["params"][-1]
    assert is_placeholder(placeholder)
    assert is_placeholder(placeholder.grad)
    assert without_placeholder(optimizer.param_groups[0]) == [frozen]
    linear(torch.ones(1, 2)).sum().backward()
    grad_norm.install()
    try:
        norm = torch.nn.utils.clip_grad_norm_([*linear.parameters(), placeholder], 1.0, 0)
    finally:
        grad_norm.remove()
    assert norm == 2  # of order 0: tensors that are counted


def test_hooks_do_nothing_once_it_is_gone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2), requires_grad=False)], lr=0.1)
    before = optimizer.state_dict()
    for _ in range(2):
        add_placeholder(optimizer, torch.device("cpu"))
        assert optimizer.state_dict() == before
        optimizer.param_groups[0]["params"].pop()
        assert optimizer.state_dict() == before
        optimizer.load_state_dict(before)
