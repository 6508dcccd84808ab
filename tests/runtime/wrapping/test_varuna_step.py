"""Varuna's `loss, overflow = model.step(inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from rannd.errors import UsageError


class Net(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.result = result

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.result(nn.functional.mse_loss(self.layer(x), y))


def _wrapped(model: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pyrannc.RaNNCModule(model, optimizer, **options), optimizer


RESULTS = {
    "the loss": lambda loss: loss,
    "a dict": lambda loss: {"logits": loss * 2, "loss": loss},
    "a tuple": lambda loss: (loss, loss * 2),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_it_is_forward_and_backward(result: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    plain = Net()
    net = Net(result)
    net.load_state_dict(plain.state_dict())
    model, optimizer = _wrapped(net)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    loss, overflow = model.step({"x": x, "y": y})
    expected = plain(x, y)
    expected.backward()
    torch.testing.assert_close(torch.Tensor([loss]), expected.detach().unsqueeze(0))
    assert overflow is False
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)
    optimizer.step()
    assert not torch.equal(model.module.layer.weight, plain.layer.weight)


def test_an_overflow_is_told_and_the_scale_falls() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = _wrapped(Net(), scaler=scaler)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    loss, overflow = model.step({"x": x, "y": y})
    assert not overflow
    assert loss.isfinite()
    gradient = model.module.layer.weight.grad.clone()
    optimizer.zero_grad()
    plain = Net()
    plain.load_state_dict(model.module.state_dict())
    plain(x, y).backward()
    torch.testing.assert_close(gradient, plain.layer.weight.grad)
    assert scaler.get_scale() == 1024.0
    _, overflow = model.step({"x": x * 1e30, "y": y})
    assert overflow
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("inputs", [torch.ones(3, 4), [torch.ones(3, 4)], None])
def test_inputs_have_names(inputs: Any) -> None:
    with pytest.raises(UsageError, match="step takes a dict"):
        _wrapped(Net())[0].step(inputs)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(UsageError, match="returns a Tensor of shape"):
        _wrapped(Net(lambda loss: loss.repeat(3)))[0].step({"x": torch.ones(3, 4), "y": torch.ones(3, 1)})


def test_a_models_own_step_comes_first() -> None:
    class Stepping(Net):
        def step(self, count: int) -> int:
            return count + 1

    assert _wrapped(Stepping())[0].step(4) == 5
