"""What blocks recompute from is elsewhere between forward and backward: training is the same to the bit."""

from __future__ import annotations

import copy
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from thinned import first
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.plan.deployment import encode
from rannd.runtime.execution import stage
from rannd.runtime.zero.host_memory import HostMemory
from rannd.runtime.zero.mapped_file import MappedFile
from rannd.runtime.zero.state_home import StateHome

LAYERS, WIDTH = 5, 20


class Layer(nn.Module):
    """A block, with dropout if it is asked for; the second one writes what it is given."""

    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.norm, self.writes = nn.BatchNorm1d(WIDTH), number == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(0.9).relu_() if self.writes else x.relu()
        return self.norm(self.drop(self.linear(x))) + x


class Blocks(nn.Module):
    """A chain whose last block also reads what the first one makes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(number, dropout) for number in range(LAYERS)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        x = x.t().contiguous().t()  # strides are kept, too
        for layer in self.layers[1:]:
            x = layer(x)
        return (x * first).square().mean()


@pytest.fixture(autouse=True)
def laid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """How often something is brought elsewhere, and back."""
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")
    monkeypatch.setenv("RANNC_OFFLOAD_ACTIVATIONS", "true")
    monkeypatch.setenv("RANNC_OFFLOAD_DIR", str(tmp_path / "offload"))
    monkeypatch.setattr(stage, "LEAST_OFFLOADED", 1)  # bytes
    counts: Counter[str] = Counter()
    for kind in (MappedFile, HostMemory):
        for name in ("lay", "back"):
            monkeypatch.setattr(kind, name, _counted(getattr(kind, name), name, counts))
    return counts


def _counted(run: Any, name: str, counts: Counter[str]) -> Any:
    def counting(self: StateHome, tensor: torch.Tensor) -> torch.Tensor:
        counts[name] += 1
        found: torch.Tensor = run(self, tensor)
        return found

    return counting


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _train(model: Any, optimizer: torch.optim.Optimizer, *, again: bool = False) -> list[float]:
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        loss = model(_batch(number))
        if again:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _pair(dropout: float = 0.0) -> tuple[Any, Any]:
    model = Blocks(dropout)
    other = copy.deepcopy(model)
    return model, other


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("again", first(1, [True, False]))
def test_steps_equal_those_of_a_plain_model(monkeypatch: pytest.MonkeyPatch, laid: Counter[str], again: bool) -> None:
    if again:  # what backward runs inside the call cannot run again
        monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", "false")
    model, other = _pair()
    optimizer = _adam(model)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    assert _train(wrapped, optimizer, again=again) == _train(other, _adam(other), again=again)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert wrapped.deployment.offload_activations
    assert all(again for planned in wrapped.deployment.stages for again in planned.segments)
    assert laid["lay"] >= 4 * (LAYERS - 2)
    assert laid["back"] >= laid["lay"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_block_that_keeps_its_values_reads_what_is_elsewhere_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, laid: Counter[str], first: int
) -> None:
    model, other = _pair()
    file = tmp_path / "plan"
    wrapped = pyrannc.RaNNCModule(copy.deepcopy(model), None)
    wrapped(_batch(0)).backward()
    planned = wrapped.deployment
    (only,) = planned.stages
    every_other = tuple((number + first) % 2 == 0 for number in range(len(only.segments)))
    assert len(every_other) > 3
    stages = (msgspec.structs.replace(only, recomputed=every_other),)
    file.write_bytes(encode(msgspec.structs.replace(planned, stages=stages)))
    monkeypatch.setenv("RANNC_LOAD_DEPLOYMENT", "true")
    monkeypatch.setenv("RANNC_DEPLOYMENT_FILE", str(file))
    laid.clear()
    optimizer = _adam(model)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    assert _train(wrapped, optimizer) == _train(other, _adam(other))
    assert wrapped.deployment.stages[0].segments == every_other
    assert laid["lay"]


@pytest.mark.usefixtures("home")
def test_masks_of_dropout_are_those_of_recomputing_in_memory(
    monkeypatch: pytest.MonkeyPatch, laid: Counter[str]
) -> None:
    found = []
    for away in ("true", "false"):
        monkeypatch.setenv("RANNC_OFFLOAD_ACTIVATIONS", away)
        monkeypatch.setenv("RANNC_CHECKPOINTING", "true")
        laid.clear()
        model = Blocks(0.3)
        optimizer = _adam(model)
        torch.manual_seed(1)
        found.append((_train(pyrannc.RaNNCModule(model, optimizer), optimizer), model.state_dict()))
        assert (laid["lay"] > 0) == (away == "true")
    (losses, values), (other_losses, others) = found
    assert losses == other_losses
    assert all(map(torch.equal, values.values(), others.values()))


def _mappings(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text("utf-8").splitlines() if str(folder) in line]


def test_further_steps_take_nothing_more_and_evaluation_nothing(laid: Counter[str], tmp_path: Path) -> None:
    model = Blocks()
    optimizer = _adam(model)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    _train(wrapped, optimizer)
    assert laid["lay"]
    taken = _mappings(tmp_path / "offload")
    assert taken
    _train(wrapped, optimizer)
    assert _mappings(tmp_path / "offload") == taken, "steps use the same room"
    assert list((tmp_path / "offload").iterdir()) == []
    laid.clear()
    with torch.no_grad():
        wrapped(_batch(9))
    assert not laid


class Writes(nn.Module):
    """Writes what it is given, which its caller must not see, and what its first layer makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x.mul_(0.5)).add_(1.0).tanh()).square().mean()


@pytest.mark.parametrize("item", ["CHECKPOINTING", "OFFLOAD_ACTIVATIONS"])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_recomputed_block_writes_is_written_once(
    monkeypatch: pytest.MonkeyPatch, item: str, again: bool
) -> None:
    monkeypatch.setenv("RANNC_OFFLOAD_ACTIVATIONS", "false")
    monkeypatch.setenv(f"RANNC_{item}", "true")
    monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", str(not again))
    model = Writes()
    other = copy.deepcopy(model)
    wrapped = pyrannc.RaNNCModule(model, _adam(model))
    batch = _batch(0)
    loss, plain = wrapped(batch), other(_batch(0))
    for keep in (True, False) if again else (False,):
        loss.backward(retain_graph=keep)
        plain.backward(retain_graph=keep)
    assert all(stage.recompute for stage in wrapped.deployment.stages)
    assert torch.equal(loss, plain)
    assert torch.equal(batch, _batch(0))
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad, rtol=1e-12, atol=0)


def test_what_was_brought_for_a_backward_that_failed_is_not_of_the_next_one() -> None:
    home = HostMemory(torch.device("cpu"), pinned=False)
    one = home.lay(torch.ones(3))
    home.coming([one])
    home.forget()
    one.fill_(2.0)
    assert float(home.back(one).sum()) == 6.0


def test_room_in_the_file_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = MappedFile(str(tmp_path))
    made = []
    real = os.posix_fallocate

    def allocate(file: int, start: int, size: int) -> None:
        made.append(size)
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    held: list[tuple[torch.Tensor, float]] = []
    for step in range(6):
        sizes = (300_000, 100_000, 200_000, 250_000)[: 4 - step % 2]  # floats; the odd steps have no quarter million
        laid = [home.lay(torch.full((size,), float(size + step))) for size in sizes]
        views = [each.view(-1, 4).t() for each in laid]
        held = [*held[-1:], (laid[-1].view(-1)[:7], float(sizes[-1] + step))]  # a view keeps its room a step longer
        del laid
        for view, value in [*zip(views, [float(size + step) for size in sizes], strict=True), *held]:
            assert view.unique().tolist() == [value], "nothing else has been written there"
        if step == 2:
            made.clear()
    assert not made


def test_room_for_less_than_wished_suffices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, most = MappedFile(str(tmp_path)), 8192
    real = os.posix_fallocate

    def allocate(file: int, start: int, size: int) -> None:
        if start + size > most:
            raise OSError(28, "No space left on device")
        real(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    laid = [home.lay(torch.full((1000,), float(number))) for number in range(2)]
    assert [each.unique().tolist() for each in laid] == [[0.0], [1.0]]
    with pytest.raises(UsageError, match=r"no room for 4 KiB more"):
        home.lay(torch.ones(1000))


def test_it_needs_no_optimizer() -> None:
    model, other = _pair()
    wrapped = pyrannc.RaNNCModule(model)
    wrapped(_batch(0)).backward()
    other(_batch(0)).backward()
    assert wrapped.deployment.offload_activations
    for one, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, plain.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["file", "host memory"])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_comes_back_has_its_values_and_strides(kind: str, transposed: bool, tmp_path: Path) -> None:
    home = MappedFile(str(tmp_path)) if kind == "file" else HostMemory(torch.device("cpu"), pinned=False)
    value = torch.arange(12.0).view(3, 4)
    value = value.t() if transposed else value
    away = home.lay(value).requires_grad_()
    home.coming([away])
    back = home.back(away)
    assert torch.equal(back, value)
    assert back.stride() == value.stride()
    assert not back.requires_grad
    spread = torch.zeros(4, 8)[:, ::2]
    assert home.back(home.lay(spread)).stride() == (4, 1), "without what is not its own"


def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    wrapped = pyrannc.RaNNCModule(model, _adam(model))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"no room for .* or set offload_optimizer, offload_params or offload_activat"):
        wrapped(_batch(0))
