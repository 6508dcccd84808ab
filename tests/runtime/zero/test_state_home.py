"""An optimizer whose state is elsewhere between steps, on one rank; tests/e2e/test_zero_jobs.py has others."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import one_in
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.runtime.optim.coupling import ELEMENTWISE, steps_apart
from rannd.runtime.zero import mapped_file, sharded_step
from rannd.runtime.zero.mapped_file import MappedFile


class Layers(nn.Module):
    """Some layers, one of which is frozen, and their mean."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 7), nn.Linear(7, 5)).to(dtype)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(autouse=True)
def offloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")
    monkeypatch.setenv("RANNC_OFFLOAD_OPTIMIZER", "true")
    monkeypatch.setenv("RANNC_OFFLOAD_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(sharded_step, "MOST", 512)  # bytes: several buckets


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(_batch(number)).backward()
    optimizer.step()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _kinds() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for number, name in enumerate(sorted(ELEMENTWISE)):
        found.append((name, {"foreach": number % 2 == 0, **({"momentum": 0.9} if name == "SGD" else {})}))
    return [*found, ("Adam", {"amsgrad": True}), ("AdamW", {"fused": True}), ("Adagrad", {"fused": True})]


def _pair(name: str, settings: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """A wrapped model and its optimizer, and others that are not."""
    kind, model = getattr(torch.optim, name), Layers()
    other = copy.deepcopy(model)
    made = []
    for each in (model, other):
        first, *rest = each.parameters()
        made.append(kind([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.01, **settings))
    return pyrannc.RaNNCModule(model, made[0]), made[0], other, made[1]


@pytest.mark.parametrize(("name", "settings"), one_in(2, _kinds()))
def test_ten_steps_equal_those_of_a_plain_optimizer(name: str, settings: dict[str, Any]) -> None:
    model, optimizer, other, plain = _pair(name, settings)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (optimizer, plain)]
    for number in range(10):
        _step(model, optimizer, number)
        _step(other, plain, number)
        for each in schedules:
            each.step()
    assert calls == ["before", "after"] * 10
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert _same(optimizer.state_dict(from_global=True), plain.state_dict())
    ((_, sharded),) = optimizer.__dict__["_rannd_whole"].shared
    tensors = [v for s in plain.state.values() for v in s.values() if torch.is_tensor(v) and v.numel() > 1]
    assert sharded.home.bytes == sum(each.nbytes for each in tensors)
    model.undeploy()
    _step(model, optimizer, 10)
    _step(other, plain, 10)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.usefixtures("home")
def test_loaded_state_and_new_groups_go_on() -> None:
    model, optimizer, other, plain = _pair("Adam", {})
    for number in range(2):
        _step(model, optimizer, number)
        _step(other, plain, number)
    saved = copy.deepcopy(optimizer.state_dict(from_global=True)), copy.deepcopy(plain.state_dict())
    for number in range(2, 4):
        _step(model, optimizer, number)
    optimizer.load_state_dict(saved[0], from_global=True)
    plain.load_state_dict(saved[1])
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.copy_(mine)
    for each, own in ((model, optimizer), (other, plain)):
        _step(each, own, 4)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert _same(optimizer.state_dict(from_global=True), plain.state_dict())


@pytest.mark.usefixtures("home")
def test_a_closure_is_called_once() -> None:
    model, optimizer, other, plain = _pair("AdamW", {})
    losses: list[list[float]] = []
    for each, own in ((model, optimizer), (other, plain)):
        calls: list[float] = []

        def closure(each: Any = each, own: Any = own, calls: list[float] = calls) -> torch.Tensor:
            own.zero_grad()
            loss: torch.Tensor = each(_batch(len(calls)))
            loss.backward()
            calls.append(float(loss.detach()))
            return loss

        each(_batch(0)).backward()
        assert [float(own.step(closure).detach()) for _ in range(4)] == calls
        losses.append(calls)
    assert losses[0] == losses[1]
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.usefixtures("home")
def test_master_weights_are_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for offload in ("false", "true"):
        monkeypatch.setenv("RANNC_MASTER_WEIGHTS", "true")
        monkeypatch.setenv("RANNC_OFFLOAD_OPTIMIZER", offload)
        model = Layers(torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters())
        wrapped = pyrannc.RaNNCModule(model, optimizer)
        for number in range(5):
            optimizer.zero_grad()
            wrapped(_batch(number).bfloat16()).backward()
            optimizer.step()
        found.append((list(model.parameters()), optimizer.state_dict(from_global=True)))
    assert all(map(torch.equal, *(parameters for parameters, _ in found)))
    assert _same(found[0][1], found[1][1])


class Counting(torch.optim.SGD):
    """Counts its steps, on which an update depends."""

    count = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data -= group["lr"] / self.count * each.grad


class ByParameter(torch.optim.SGD):
    """Counts steps of each parameter."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["count"] = state.get("count", 0) + 1
                    each.data -= group["lr"] / state["count"] * each.grad


def test_what_counts_its_steps_is_refused() -> None:
    model = Layers()
    assert steps_apart(ByParameter(model.parameters(), lr=0.1))
    optimizer = Counting(model.parameters(), lr=0.1)
    assert not steps_apart(optimizer)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    with pytest.raises(UsageError, match="Counting cannot step some parameters after others"):
        wrapped(_batch(0))


class Nested(torch.optim.Adam):
    """Its step is one of the base class."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_a_step_within_a_step_is_refused_and_nothing_is_stepped() -> None:
    model = Layers()
    torch.optim.Adam(model.parameters())  # from now on the class calls hooks
    optimizer = Nested(model.parameters())
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    wrapped(_batch(0)).backward()
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UsageError, match="the step of Nested calls that of its base class"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_full_disk_is_told_with_folder_and_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = MappedFile(str(tmp_path))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=rf"offload_dir={tmp_path}: no room for 4 KiB .*No space left.*are free"):
        made.keep("weight", {"moment": torch.zeros(10)}, 10)


def test_memory_is_no_disk_and_files_have_no_names(tmp_path: Path) -> None:
    if mapped_file._filesystem("/dev/shm") == "tmpfs":
        with pytest.raises(UsageError, match="tmpfs, which is in memory"):
            MappedFile("/dev/shm")
    made = MappedFile(str(tmp_path / "below" / "it"))
    state: dict[str, Any] = {"moment": torch.arange(10.0), "step": torch.tensor(3.0), "parts": [torch.ones(10)]}
    made.keep("weight", state, 10)
    assert list((tmp_path / "below" / "it").iterdir()) == []
    assert made.bytes == 80
    assert torch.equal(state["moment"], torch.arange(10.0))
    before = state["moment"].data_ptr()
    made.keep("weight", state, 10)
    assert state["moment"].data_ptr() == before
    made.restore("weight", state)
    assert state["moment"].data_ptr() != before
