"""A tensor of another rank: what it is goes on, and nothing reads it as a number."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from rannd.errors import UsageError
from rannd.runtime.parameters.absent import all_present, is_absent, make_absent, make_present
from rannd.runtime.parameters.tensor_swap import hollow

WORDS = r"needs the values of layer\.weight on rank 1 \(stage 1\): this rank does not have them"


class Scale(nn.Parameter):
    """A class of the user's own."""


@pytest.fixture(params=["parameter", "buffer", "own class", "integers"])
def tensor(request: pytest.FixtureRequest) -> Tensor:
    made: dict[str, Callable[[], Tensor]] = {
        "parameter": lambda: nn.Parameter(torch.randn(4, 3)),
        "buffer": lambda: torch.randn(4, 3),
        "own class": lambda: Scale(torch.randn(4, 3)),
        "integers": lambda: torch.arange(12).view(4, 3),
    }
    return made[request.param]()


def absent(tensor: Tensor) -> Tensor:
    kept = hollow(tensor) if tensor.is_floating_point() else tensor.data
    make_absent(tensor, kept, "layer.weight on rank 1 (stage 1)")
    return tensor


def holding(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    if isinstance(tensor, nn.Parameter):
        module.weight = tensor
    else:
        module.register_buffer("weight", tensor)
    return module


USES: dict[str, Callable[[Tensor], Any]] = {
    "adding": lambda t: t + 1,
    "adding to another": lambda t: torch.ones(4, 3) + t,
    "matmul": lambda t: torch.ones(2, 4) @ t,
    "in place": lambda t: t.mul_(2),
    "data": lambda t: t.data,
    "data set": lambda t: setattr(t, "data", torch.zeros(4, 3)),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "item": lambda t: t[0, 0].item(),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "iteration": lambda t: list(t),
    "truth": lambda t: bool(t[0, 0]),
    "comparison": lambda t: torch.equal(t, t),
    "view": lambda t: t.view(-1),
    "transposed": lambda t: t.T,
    "stack": lambda t: torch.stack([torch.ones(4, 3), t]),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "copying from it": lambda t: torch.zeros(4, 3).copy_(t),
    "copying into it": lambda t: t.copy_(torch.zeros(4, 3)),
    "to another type": lambda t: t.to(torch.float64),
    "to the CPU": lambda t: t.cpu(),
    "to meta": lambda t: t.to("meta"),
    "initialising": nn.init.ones_,
    "storage": lambda t: t.untyped_storage(),
    "address": lambda t: t.data_ptr(),
    "sharing": lambda t: t.share_memory_(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of its module": lambda t: copy.deepcopy(holding(t)),
    "pickle": pickle.dumps,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "save of its module": lambda t: torch.save(holding(t), io.BytesIO()),
    "state_dict": lambda t: holding(t).state_dict(),
    "state_dict with keep_vars, saved": lambda t: torch.save(holding(t).state_dict(keep_vars=True), io.BytesIO()),
    "safetensors": lambda t: safetensors.torch.save({"weight": t}),
    "safetensors' save_model": lambda t: safetensors.torch.save_model(holding(t), "/nonexistent/model"),
    "loading": lambda t: holding(t).load_state_dict({"weight": torch.zeros(4, 3)}),
    "conversion of its module": lambda t: holding(t).double(),
    "norm": lambda t: torch.nn.utils.parameters_to_vector([t]),
}


@pytest.mark.parametrize("use", USES)
def test_no_use_of_its_values(tensor: Tensor, use: str) -> None:
    absent(tensor)
    if use == "conversion of its module" and not tensor.is_floating_point():
        USES[use](tensor)  # leaves integers alone
        return
    with pytest.raises(UsageError, match=WORDS):
        USES[use](tensor)
    assert is_absent(tensor)


def test_what_it_is_goes_on(tensor: Tensor) -> None:
    module, kind, number = holding(tensor), type(tensor), id(tensor)
    trained = tensor.is_floating_point()
    before = (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad, tensor.numel())
    absent(tensor)
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad, tensor.numel()) == before
    assert isinstance(tensor, kind)
    assert id(module.weight) == number
    assert tensor in {tensor}
    assert (len(tensor), tensor.dim(), tensor.size(1), tensor.is_leaf, tensor.grad) == (4, 2, 3, True, None)
    assert "layer.weight on rank 1 (stage 1)" in repr(tensor)
    assert "layer.weight on rank 1 (stage 1)" in f"{tensor}"
    assert str(module) == "Module()"
    tensor.mark = 3  # type: ignore[attr-defined]
    assert torch.zeros_like(tensor).tolist() == [[0] * 3] * 4
    assert type(torch.zeros_like(tensor)) is Tensor
    assert tensor.new_zeros(2).dtype is tensor.dtype
    if trained:
        tensor.requires_grad_(True)
        assert tensor.requires_grad
        tensor.grad = torch.ones(4, 3)
        tensor.grad = None
        torch.optim.SGD([tensor], lr=0.1).step()
        assert sum(t.numel() for t in (*module.parameters(), *module.buffers())) == 12


def test_it_is_itself_again(tensor: Tensor) -> None:
    kind, shape = type(tensor), tensor.shape
    absent(tensor)
    make_present(tensor)
    make_present(tensor)
    assert type(tensor) is kind
    assert tensor.shape == shape
    assert not is_absent(tensor)
    tensor.data = torch.ones(4, 3, dtype=tensor.dtype)
    assert (tensor * 2).sum().item() == 24


def test_hooks_and_attributes_stay() -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    parameter.mark = 3  # type: ignore[attr-defined]
    called: list[str] = []
    parameter.register_hook(lambda gradient: called.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda each: called.append("accumulated"))
    absent(parameter)
    assert parameter.mark == 3  # type: ignore[attr-defined]
    make_present(parameter)
    parameter.data = torch.ones(4, 3)
    parameter.sum().backward()
    assert called == ["hook", "accumulated"]


def test_for_a_while_they_are_there() -> None:
    parameter, other, integers = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(2)), torch.arange(3)
    absent(parameter)
    absent(integers)
    with pytest.raises(KeyError), all_present([parameter, other, integers]):  # noqa: PT012
        assert bool(parameter.isnan().all())
        assert integers.tolist() == [0, 1, 2]
        parameter.requires_grad_(False)
        raise KeyError
    assert is_absent(parameter)
    assert is_absent(integers)
    assert not is_absent(other)
    assert not parameter.requires_grad


def test_the_advice_fits_the_call() -> None:
    class Saved(nn.Module):
        def save_pretrained(self) -> None:
            self.weight.detach()

    module = Saved()
    module.weight = absent(nn.Parameter(torch.randn(4, 3)))
    for use, advice in (
        (module.save_pretrained, r"Call model\.save_pretrained\(\.\.\) of the RaNNCModule"),
        (lambda: torch.optim.swa_utils.AveragedModel(module), r"Use pyrannc\.AveragedModel\(model\)"),
        (lambda: copy.deepcopy(module), r"model\.undeploy\(\) on all ranks$"),
        (lambda: module.load_state_dict({"weight": torch.zeros(4, 3)}), r"Call model\.load_state_dict\(state\) of the"),
        (lambda: module.weight + 1, r"Call the RaNNCModule, not the model inside it, to compute"),
    ):
        with pytest.raises(UsageError, match=f"{WORDS}.*{advice}"):
            use()
