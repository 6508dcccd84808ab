"""What may be wrapped, what a wrapped model shows of its own, and what its parameters' hooks may do."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import StepError, UsageError


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def _sharing(inner: nn.Sequential) -> nn.Module:
    other = nn.Linear(4, 4)
    other.weight = inner[0].weight
    return other


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda inner, module: inner, "the model is already wrapped in a RaNNCModule"),
        (lambda inner, module: module, "the model is itself a RaNNCModule"),
        (lambda inner, module: nn.Sequential(nn.Linear(4, 4), module), "submodule 1 of the model is a RaNNCModule"),
        (lambda inner, module: inner[1], r"the model is submodule 1 of a model that is already wrapped"),
        (lambda inner, module: nn.Sequential(inner), "submodule 0 of the model is already wrapped in a RaNNCModule"),
        (lambda inner, module: nn.Sequential(inner[1][1]), r"submodule 0 of the model is submodule 1.1 of a model"),
        (lambda inner, module: _sharing(inner), r"weight is 0.weight of a model that is already wrapped"),
    ],
    ids=["twice", "wrapper", "around", "part", "whole inside", "shared module", "shared parameter"],
)
@pytest.mark.parametrize("deployed", [False, True])
def test_a_parameter_belongs_to_one_wrapped_model(
    other: Callable[[nn.Module, nn.Module], nn.Module], message: str, deployed: bool
) -> None:
    inner = network()
    module = pyrannc.RaNNCModule(inner)
    if deployed:
        module(torch.randn(2, 4))
    with pytest.raises(UsageError, match=message):
        pyrannc.RaNNCModule(other(inner, module))


def test_a_model_is_free_again_when_its_wrapper_is_gone() -> None:
    inner = network()
    module = pyrannc.RaNNCModule(inner)
    module(torch.randn(2, 4))
    pyrannc.RaNNCModule(copy.deepcopy(inner))  # a copy has never been wrapped
    pyrannc.clear()
    again = pyrannc.RaNNCModule(inner)
    x = torch.randn(2, 4)
    torch.testing.assert_close(again(x), inner(x))
    del module, again
    gc.collect()
    pyrannc.RaNNCModule(inner)


def test_a_refused_wrap_leaves_the_model_free() -> None:
    inner = network()
    with pytest.raises(UsageError, match="enable_apex_amp"):
        pyrannc.RaNNCModule(inner, enable_apex_amp=True)
    pyrannc.RaNNCModule(inner)


def test_modules_are_the_models_own() -> None:
    inner = network()
    module = pyrannc.RaNNCModule(inner)
    assert dict(module.named_modules()).keys() == dict(inner.named_modules()).keys()
    assert sum(isinstance(each, nn.Linear) for each in module.modules()) == 2
    assert list(module.children()) == list(inner.children())
    around = nn.Module()
    around.body = module
    assert [name for name, _ in around.named_parameters()] == [f"body.{name}" for name, _ in inner.named_parameters()]
    module.apply(lambda each: nn.init.zeros_(each.weight) if isinstance(each, nn.Linear) else None)
    assert not inner[0].weight.any()
    module.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in inner.parameters())


def test_parameters_and_gradients_by_any_name() -> None:
    inner = Tied()
    plain = copy.deepcopy(inner)
    module = pyrannc.RaNNCModule(inner)
    x = torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(module.get_param("last.weight"), plain.first.weight)
        with pytest.raises(UsageError, match=r"no parameter 'last\.bias'"):
            module.get_param_grad("last.bias")
        expected = plain.first.weight.grad
        for name in ("first.weight", "last.weight"):
            found = module.get_param_grad(name)
            if expected is None:
                assert found is None
            else:
                assert found is not None
                torch.testing.assert_close(found, expected)
        if expected is None:
            module(x).pow(2).sum().backward()
            plain(x).pow(2).sum().backward()
    found = module.get_param_grad("first.weight")
    assert found is not None
    found.zero_()  # a copy
    assert inner.first.weight.grad is not None
    assert inner.first.weight.grad.any()


def test_a_hook_that_returns_no_gradient_is_told() -> None:
    module = pyrannc.RaNNCModule(nn.Linear(4, 4))
    weight = next(iter(module.parameters()))
    handle = weight.register_hook(lambda gradient: gradient[0])
    with pytest.raises(StepError, match=r"hook of parameter weight returned \(4,\)"):
        module(torch.randn(2, 4)).sum().backward()
    handle.remove()
    weight.register_hook(lambda gradient: 3)
    with pytest.raises(StepError, match=r"hook of parameter weight returned int"):
        module(torch.randn(2, 4)).sum().backward()


def test_undeploying_alone() -> None:
    inner = Tied()
    optimizer = torch.optim.Adam(inner.parameters())
    module = pyrannc.RaNNCModule(inner, optimizer)
    x = torch.randn(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()
        state = {name: each.clone() for name, each in inner.state_dict().items()}
        module.undeploy()
        with pytest.raises(StepError, match="no deployment before its first call"):
            _ = module.deployment
        assert all(torch.equal(state[name], each) for name, each in inner.state_dict().items())
        assert len(optimizer.state) == 2


def test_after_clear_everything_says_so() -> None:
    module = pyrannc.RaNNCModule(network())
    module(torch.randn(2, 4))
    pyrannc.clear()
    uses: list[Callable[[], object]] = [
        lambda: module(torch.randn(2, 4)), lambda: list(module.parameters()), module.state_dict, module.undeploy,
        module.allreduce_grads, lambda: module.clip_grad_norm(1.0), lambda: module.get_param("0.weight"),
        module.zero_grad, lambda: module.enable_dropout(False), lambda: module.deployment,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StepError, match=r"dropped by pyrannc\.clear"):
            use()


def test_a_wrapper_is_neither_copied_nor_pickled() -> None:
    module = pyrannc.RaNNCModule(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Copy the model before it is wrapped"):
        torch.optim.swa_utils.AveragedModel(module)
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(module)
