"""An optimizer that a RaNNCModule was not given, and that has a part of the model on each rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.optim import unknown_optimizer
from rannd.runtime.parameters.absent import make_absent, make_present


@pytest.fixture
def watched() -> Iterator[None]:
    unknown_optimizer.install()
    yield
    unknown_optimizer.remove()


def trained(layer: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that makes a step of the layer's weight."""
    optimizer = torch.optim.Adam(layer.parameters())
    step(layer, optimizer)
    return optimizer


def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()


@pytest.mark.usefixtures("watched")
def test_its_state_is_refused_once_it_steps_a_part(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(3, 2)
    optimizer = trained(layer)
    state = optimizer.state_dict()
    assert not caplog.records
    bias = layer.bias
    make_absent(bias, torch.zeros(2), "rank 1")
    for _ in range(2):
        step(layer, optimizer)
    assert caplog.text.count("Adam steps parameters of a RaNNCModule that was not given it") == 1
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(state), lambda: pickle.dumps(optimizer)):
        with pytest.raises(UsageError, match=r"Adam was not given .*Write RaNNCModule\(model, optimizer\)"):
            use()
    unknown_optimizer.remove()
    make_present(bias)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


@pytest.mark.usefixtures("watched")
def test_one_that_has_all_it_steps_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = trained(nn.Linear(3, 2))
    assert optimizer.state_dict()["state"]
    assert not caplog.records
