"""What scripts written for DistributedDataParallel do with their wrapper."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import swa_utils

import pyrannc
from rannd.errors import UsageError
from rannd.runtime.comm import process_flags


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pixels: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.layer(pixels).square().mean() * scale


def wrapped(net: nn.Module | None = None) -> Any:
    net = net or Named()
    return pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_the_signature_is_the_models() -> None:
    model = wrapped()
    assert inspect.signature(model.forward) == inspect.signature(Named().forward)
    assert list(inspect.signature(model.forward).parameters) == ["pixels", "labels", "scale"]
    loss = model(torch.ones(2, 4), scale=2.0)
    assert torch.equal(model.forward(torch.ones(2, 4), scale=2.0), loss)


def test_a_wrapper_ends_with_its_last_name() -> None:
    model = wrapped()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_subclass_may_have_a_forward_of_its_own() -> None:
    class Twice(pyrannc.RaNNCModule):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 2

    net = Named()
    model = Twice(net)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), net(x) * 2)


def test_module_is_the_wrapped_model() -> None:
    net = Named()
    assert wrapped(net).module is net


def test_no_sync_delays_until_its_end() -> None:
    model, plain = wrapped(), Named()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with model.no_sync():
        assert process_flags.delayed
        model(x).backward()
        assert all(p.grad is None for p in model.parameters())
    model(y).backward()
    (plain(x) + plain(y)).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert not process_flags.delayed
    pyrannc.delay_grad_allreduce(True)
    with model.no_sync():
        pass
    assert process_flags.delayed


@pytest.mark.parametrize("change", ["to('cpu')", "cpu()", "to(torch.float32)", "float()"])
def test_what_changes_nothing_is_silent(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped()
    with caplog.at_level(logging.WARNING):
        assert eval(f"model.{change}") is model
    assert not caplog.records


@pytest.mark.parametrize("change", ["to('meta')", "to('meta', torch.float32)"])
def test_what_would_move_it_is_told(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped()
    with caplog.at_level(logging.WARNING):
        eval(f"model.{change}")
    assert ["cannot be moved" in each.getMessage() for each in caplog.records] == [True]
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}


@pytest.mark.parametrize("change", ["double()", "to(torch.float64)", "to('cpu', torch.float64)", "bfloat16()"])
def test_a_model_that_is_not_deployed_is_converted(change: str, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain = copy.deepcopy(net)
    model = wrapped(net)
    objects = list(net.parameters())
    with caplog.at_level(logging.WARNING):
        assert eval(f"model.{change}") is model
    eval(f"plain.{change}")
    assert not caplog.records
    dtype = plain[0].weight.dtype
    assert all(mine is before for mine, before in zip(net.parameters(), objects, strict=True))  # the optimizer's
    x = torch.randn(6, 4, dtype=dtype)
    for call in (model, plain):
        call(x).pow(2).sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.grad, other.grad)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.state_dict()[name], buffer)


def test_a_deployed_model_is_not_converted() -> None:
    model = wrapped()
    model(torch.ones(2, 4)).backward()
    with pytest.raises(UsageError, match=r"\(torch\.float32 to torch\.bfloat16\) any more: .* model\.undeploy\(\)"):
        model.to(torch.bfloat16)
    with pytest.raises(UsageError, match=r"torch\.float32 to torch\.float64"):
        nn.Sequential(model).double()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.undeploy()
    model.double()
    loss = model(torch.ones(2, 4, dtype=torch.float64))
    loss.backward()
    assert {loss.dtype, *(p.grad.dtype for p in model.parameters())} == {torch.float64}


def test_torch_compile_runs_the_plan_and_says_that_it_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = wrapped(), Named()
    plain.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING):
        compiled: Any = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2, 4), scale=2.0).backward()
            plain(torch.ones(2, 4), scale=2.0).backward()
    told = "torch.compile of a RaNNCModule compiles nothing: ranks run graphs of their own. Set compile_stages="
    assert [told in each.getMessage() for each in caplog.records] == [True]
    assert compiled.module is model.module
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_the_method_compile_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model = wrapped()
    with caplog.at_level(logging.WARNING):
        model.compile(mode="max-autotune")
    assert ["compiles nothing" in each.getMessage() for each in caplog.records] == [True]
    model(torch.ones(2, 4)).backward()


def test_compiled_parts_of_the_model_train() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    plain = copy.deepcopy(net)
    net[1] = torch.compile(net[1], backend="eager")
    x = torch.randn(2, 4)
    torch.testing.assert_close(wrapped(net)(x), plain(x))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_another_wrapper_around_it_is_refused() -> None:
    model = wrapped()
    with pytest.raises(UsageError, match=r"averages gradients over all ranks itself; use it without Distr"):
        nn.parallel.DistributedDataParallel(model)
    for wrap in (FullyShardedDataParallel, fully_shard):
        with pytest.raises(UsageError, match=r"fully_shard\(\.\.\) or replicate\(\.\.\): .* use it without another"):
            wrap(model)
    with pytest.raises(UsageError, match=r"in place of get_model_state_dict\(model\) call model\.state_dict\(\)"):
        get_model_state_dict(model)
    model(torch.ones(2, 4)).backward()


def test_accelerate_leaves_it_alone() -> None:
    model = wrapped()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, model.optimizer)
    assert prepared is model
    assert accelerator.unwrap_model(prepared) is model
    before = model.get_param("layer.weight")
    accelerator.backward(prepared(torch.ones(2, 4)))
    optimizer.step()
    assert not torch.equal(model.get_param("layer.weight"), before)


def test_accelerates_mixed_precision_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    model = wrapped()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        assert accelerator.prepare(model) is model
        assert "Accelerate's mixed_precision='bf16' does not reach a RaNNCModule" in capfd.readouterr().err
        with accelerator.autocast():
            assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_compiled_model_runs_its_graph_and_gets_its_call_back(capfd: pytest.CaptureFixture[str]) -> None:
    def compiled(*_: Any) -> Any:
        raise AssertionError("this is the code of torch.compile")

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net._compiled_call_impl = compiled
    model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.1))
    assert "torch.compile of the wrapped model has no effect" in capfd.readouterr().err
    model(torch.ones(2, 4)).sum().backward()
    net(torch.ones(2, 4)).sum().backward()
    pyrannc.clear()
    with pytest.raises(AssertionError, match=r"torch\.compile"):
        net(torch.ones(2, 4))


def test_what_torch_compile_returned_is_wrapped_without_it(capfd: pytest.CaptureFixture[str]) -> None:
    net = Named()
    model = pyrannc.RaNNCModule(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), lr=0.1))
    assert capfd.readouterr().err.count("torch.compile of the wrapped model has no effect") == 1
    assert model.module is net
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    model(torch.ones(2, 4)).backward()
    hooked: Any = torch.compile(Named(), backend="eager")
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"the module that torch\.compile returned has hooks"):
        pyrannc.RaNNCModule(hooked)


def test_a_wrapper_that_is_gone_leaves_the_model_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model: Any = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.1))
    model(torch.ones(2, 4))
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
    assert net(torch.ones(2, 4)).shape == (2, 2)
    assert copy.deepcopy(net)(torch.ones(2, 4)).shape == (2, 2)
    assert "_compiled_call_impl" not in vars(copy.deepcopy(net))


def test_a_whole_model_that_is_opaque_is_recomputed() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            while float(y.abs().max()) > 1:  # no graph can show it
                y = y / 2
            return y

    net = Deciding()
    plain = copy.deepcopy(net)
    model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.1))
    x = torch.full((2, 4), 9.0)
    for call in (model, net):
        found, wanted = call(x), plain(x)
        torch.testing.assert_close(found, wanted)
        net.zero_grad()
        found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_averages_are_called_in_a_mode_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.BatchNorm1d(4))
    net[2].eval()
    model = wrapped(net)
    ema, x = pyrannc.AveragedModel(model), torch.ones(2, 4)
    ema.update_parameters()
    assert ema.training
    assert not ema(x).count_nonzero()
    assert ema.eval() is ema
    assert not ema.training
    assert ema(x).count_nonzero()
    assert [each.training for each in (model, net, *net)] == [True, True, True, True, False]
    assert not model(x).count_nonzero()
    model.eval()
    ema.train()
    assert not ema(x).count_nonzero()
    assert model(x).count_nonzero()


def test_averages_may_give_targets_between_forward_and_backward() -> None:
    """As a mean teacher does; gradients are those of the model's own values."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
    model = pyrannc.RaNNCModule(net, optimizers[0])
    ema = pyrannc.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    theirs = swa_utils.AveragedModel(plain, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        x = torch.randn(4, 4)
        losses = []
        for each, average, optimizer in zip((model, plain), (ema, theirs), optimizers, strict=True):
            outputs = each(x)
            with torch.no_grad():
                targets = average(x + 1)
            optimizer.zero_grad()
            loss = (outputs - targets).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        ema.update_parameters()
        theirs.update_parameters(plain)
    outputs = model(x)
    with torch.no_grad():
        net[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("name", ["parameters", "to", "requires_grad_"])
def test_averages_say_what_they_have_instead_of_a_modules_attributes(name: str) -> None:
    ema = pyrannc.AveragedModel(wrapped())
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is no torch\.nn\.Module.*average_parameters"):
        getattr(ema, name)
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        ema.other  # noqa: B018


class Region(nn.Module):
    """A layer in float32 between others, whatever the script's autocast is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        return self.last(x).float().square().mean()


def test_backward_inside_a_call_under_autocast_is_that_of_after_the_region() -> None:
    torch.manual_seed(0)
    plain, inner = Region(), Region()
    inner.load_state_dict(plain.state_dict())
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [each(x) for each in (model, plain)]
    for loss in losses:
        loss.backward()
    for mine, other in zip(inner.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-9)
