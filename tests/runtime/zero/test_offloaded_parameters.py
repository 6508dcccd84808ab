"""Parameters that are elsewhere while no segment reads them (offload_params): training is the same to the bit."""

from __future__ import annotations

import copy
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import first
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.plan.stage_costs import estimate
from rannd.runtime.execution.stage import Computing
from rannd.runtime.parameters.absent import part_of
from rannd.runtime.zero import division, mapped_file
from rannd.runtime.zero.mapped_file import MappedFile
from rannd.runtime.zero.tensor_piece import TensorPiece, flat_part


class Blocks(nn.Module):
    """A chain with a tied weight, a frozen one, a scalar, a buffer that is written and dropout."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(4))).to(dtype)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.layers[1][0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(20, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.layers(x)) * self.scale).square().mean()


@pytest.fixture(autouse=True)
def _offloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")
    monkeypatch.setenv("RANNC_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("RANNC_OFFLOAD_DIR", str(tmp_path / "offload"))
    monkeypatch.setattr(mapped_file, "LEAST_OFFLOADED", 1)  # bytes: all gradients go to files
    monkeypatch.setattr(division, "MOST", 2000)  # bytes: several buckets
    monkeypatch.setattr(estimate, "SEGMENT", 0)  # bytes: each block is a segment


def _batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 20, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _pair(name: str = "AdamW", **settings: Any) -> tuple[Any, Any, Any, Any]:
    """A wrapped model and its optimizer, and others that are not."""
    model, kind = Blocks(), getattr(torch.optim, name)
    other = copy.deepcopy(model)
    made = [kind([p for p in each.parameters() if p.requires_grad], lr=0.01, **settings) for each in (model, other)]
    return pyrannc.RaNNCModule(model, made[0]), made[0], other, made[1]


def _train(model: Any, optimizer: torch.optim.Optimizer, numbers: range, calls: int = 1) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        for call in range(calls):
            loss = model(_batch(number * calls + call))
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def _equal(one: Any, other: Any) -> bool:
    left, right = _values(one), _values(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("offload_optimizer", first(1, ["true", "false"]))
@pytest.mark.parametrize("calls", first(1, [3, 1]))
@pytest.mark.parametrize(
    ("name", "settings"), first(1, [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Adam", {"fused": True})])
)
def test_steps_equal_those_of_a_plain_model(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], calls: int, offload_optimizer: str
) -> None:
    monkeypatch.setenv("RANNC_OFFLOAD_OPTIMIZER", offload_optimizer)
    model, optimizer, other, plain = _pair(name, **settings)
    assert _train(model, optimizer, range(5), calls) == _train(other, plain, range(5), calls)
    assert (model.deployment.offload_params, model.deployment.zero) == (True, 3)
    assert _equal(model, other)
    weight = dict(model.named_parameters())["layers.1.0.weight"]
    assert isinstance(part_of(weight), TensorPiece)
    model.undeploy()
    assert part_of(weight) is None
    assert _train(model, optimizer, range(5, 7)) == _train(other, plain, range(5, 7))
    assert _equal(model, other)


def test_parameters_and_gradients_are_in_files() -> None:
    model, optimizer, _, _ = _pair()
    _train(model, optimizer, range(2))
    regions = _mapped()
    weight = dict(model.named_parameters())["layers.1.0.weight"]
    for held in (part_of(weight), weight.grad):
        assert isinstance(held, TensorPiece)
        where = flat_part(held).data_ptr()
        assert any(low <= where < high for low, high in regions)
    scale = dict(model.named_parameters())["scale"]
    assert not any(low <= scale.data_ptr() < high for low, high in regions), "not divided, so it stays"


def _mapped() -> list[tuple[int, int]]:
    """Addresses of files without a name that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [tuple(int(at, 16) for at in line.split()[0].split("-")) for line in lines if line.endswith("(deleted)")]  # type: ignore[misc]


@pytest.mark.usefixtures("home")
def test_checkpoints_load_with_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer, other, plain = _pair()
    _train(model, optimizer, range(2))
    _train(other, plain, range(2))
    pyrannc.save_checkpoint(tmp_path / "saved", model, optimizer)
    for again in ("false", "true"):
        monkeypatch.setenv("RANNC_OFFLOAD_PARAMS", again)
        loaded, own, _, _ = _pair()
        pyrannc.load_checkpoint(tmp_path / "saved", loaded, own)
        continued = copy.deepcopy(other)
        reference = torch.optim.AdamW([p for p in continued.parameters() if p.requires_grad], lr=0.01)
        reference.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert _train(loaded, own, range(2, 4)) == _train(continued, reference, range(2, 4))
        assert loaded.deployment.offload_params == (again == "true")
        assert _equal(loaded, continued)


@pytest.mark.usefixtures("home")
def test_clipping_values_that_a_script_sets_and_retained_graphs() -> None:
    model, optimizer, other, plain = _pair()
    for number in range(3):
        norms = []
        for each, own in ((model, optimizer), (other, plain)):
            own.zero_grad()
            loss = each(_batch(number))
            loss.backward(retain_graph=True)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)))
            own.step()
            with torch.no_grad():
                named = dict(each.named_parameters())
                named["layers.1.0.weight"].mul_(0.5)
                named["layers.3.0.bias"].copy_(torch.arange(20.0))
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    for name, value in _values(other).items():
        assert torch.allclose(_values(model)[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.usefixtures("home")
def test_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_MASTER_WEIGHTS", "true")
    found = []
    for offload in ("false", "true"):
        monkeypatch.setenv("RANNC_OFFLOAD_PARAMS", offload)
        monkeypatch.setenv("RANNC_OFFLOAD_OPTIMIZER", offload)
        inner = Blocks(torch.bfloat16)
        optimizer = torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad], lr=0.01)
        model = pyrannc.RaNNCModule(inner, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(_batch(number).bfloat16()).backward()
            optimizer.step()
        found.append(_values(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_model_without_values_gets_them_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found, x = [], torch.randn(4, 40)
    for offload in ("false", "true"):
        monkeypatch.setenv("RANNC_OFFLOAD_PARAMS", offload)
        torch.manual_seed(3)
        with pyrannc.DistributeModelParams():
            inner = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
        model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        found.append((model(x).detach(), _values(model)))
        assert model.deployment.offload_params == (offload == "true")
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


class Whole(torch.optim.SGD):
    """An update of an element that depends on all others."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data -= group["lr"] * each.grad / (each.grad.norm() + 1)


def test_what_cannot_be_divided_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = pyrannc.RaNNCModule(inner, Whole(inner.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="Whole cannot step a part of a parameter"):
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(UsageError, match="offload_params=true needs the optimizer"):
        pyrannc.RaNNCModule(nn.Linear(4, 4))(torch.randn(2, 4))


def test_compiled_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_COMPILE_STAGES", "blocks")
    model, _, _, _ = _pair()
    with pytest.raises(UsageError, match="offload_params=true and compile_stages=blocks"):
        model(_batch(0))


@pytest.mark.usefixtures("home")
def test_a_call_that_failed_leaves_no_old_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, other, plain = _pair()
    _train(model, optimizer, range(1))
    _train(other, plain, range(1))
    run = Computing._run

    def fail(self: Computing, step: Any, piece: int, number: int, *args: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return run(self, step, piece, number, *args)

    monkeypatch.setattr(Computing, "_run", fail)
    with pytest.raises(KeyboardInterrupt):
        model(_batch(1))
    monkeypatch.setattr(Computing, "_run", run)
    for each in (model, other):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.5)
    assert _train(model, optimizer, range(2, 4)) == _train(other, plain, range(2, 4))


@pytest.mark.usefixtures("home")
def test_delayed_reduction_and_gradients_set_to_zero() -> None:
    model, optimizer, other, plain = _pair()
    for number in range(3):
        model.zero_grad(set_to_none=number % 2 == 0)
        plain.zero_grad(set_to_none=number % 2 == 0)
        pyrannc.delay_grad_allreduce(True)
        for call in range(2):
            model(_batch(2 * number + call)).backward()
            other(_batch(2 * number + call)).backward()
        pyrannc.delay_grad_allreduce(False)
        model.allreduce_grads()
        optimizer.step()
        plain.step()
    assert _equal(model, other)


def test_a_disk_that_is_full_is_told_when_gradients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "CHUNK", 1)  # no room is taken in advance,
    monkeypatch.setattr(mapped_file, "ALIGNMENT", mmap.PAGESIZE)  # and none is left
    model, _, _, _ = _pair()
    real = MappedFile.loan

    def loan(self: MappedFile, tensor: torch.Tensor) -> torch.Tensor:
        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        return real(self, tensor)

    monkeypatch.setattr(MappedFile, "loan", loan)
    with pytest.raises(UsageError, match=r"no room for .* more of what is offloaded.*No space left"):
        model(_batch(1)).backward()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_loan_goes_with_its_tensor(tmp_path: Path) -> None:
    made = MappedFile(str(tmp_path))
    before, opened = len(_mapped()), _descriptors()
    loans = [made.loan(torch.full((50,), float(number))) for number in range(3)]
    assert len(_mapped()) == before + 1, "of which a process may have vm.max_map_count"
    assert _descriptors() == opened + 1, "a large model has thousands of loans"
    assert [float(each.sum()) for each in loans] == [0.0, 50.0, 100.0]
    part, kept, places = loans[1][10:20], loans[1].data_ptr(), {each.data_ptr() for each in loans}
    del loans
    others = [made.loan(torch.full((50,), 7.0)) for _ in range(3)]
    assert float(part.sum()) == 10.0
    assert len(places & {each.data_ptr() for each in others}) == 2
    assert kept not in {each.data_ptr() for each in others}, "a part of it is still used"
