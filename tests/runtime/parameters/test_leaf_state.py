"""What a leaf keeps from call to call: the calls of the script move it; tracing, measuring and verifying do not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import TraceError


class Memory:
    """An object that a module has."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes = [0]


class Keeping(nn.Module):
    """A leaf, because its way depends on values; what it does with `draw` depends on what it keeps."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw
        self.torchs = torch.Generator().manual_seed(3)
        self.listed = [torch.Generator().manual_seed(4)]
        self.python, self.old, self.new = random.Random(5), np.random.RandomState(6), {"mask": np.random.default_rng(7)}
        self.seen: list[int] = []
        self.history: deque[int] = deque([0], maxlen=100)
        self.counts = {"calls": [0]}
        self.memory = Memory()
        self.tensor, self.array = torch.zeros(2), np.zeros(2)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        made = self.layer(a) * self.draw(self)
        return made if made.sum() > 0 else made * 2


def _list(m: Any) -> float:
    m.seen.append(1)
    return float(len(m.seen))


def _deque(m: Any) -> float:
    m.history.append(m.history[-1] + 1)
    return float(m.history[-1])


def _nested(m: Any) -> float:
    m.counts["calls"][0] += 1
    return float(m.counts["calls"][0])


def _object(m: Any) -> float:
    m.memory.calls += 1
    m.memory.sizes.append(1)
    return float(m.memory.calls + len(m.memory.sizes))


def _tensor(m: Any) -> float:
    m.tensor += 1
    return float(m.tensor[0])


def _array(m: Any) -> float:
    m.array += 1
    return float(m.array[0])


def _rebound(m: Any) -> float:
    m.tensor = m.tensor + 1
    return float(m.tensor[0])


@pytest.mark.parametrize(
    "draw",
    [
        _list, _deque, _nested, _object, _tensor, _array, _rebound,
        lambda m: torch.rand((), generator=m.torchs).item(),
        lambda m: torch.rand((), generator=m.listed[0]).item(),
        lambda m: m.python.random(),
        lambda m: m.old.rand(),
        lambda m: m.new["mask"].random(),
    ],
    ids=[
        "list", "deque", "nested", "object", "tensor", "array", "rebound tensor", "generator", "generator in a list",
        "random.Random", "RandomState", "numpy generator in a dict",
    ],
)  # fmt: skip
def test_a_leaf_keeps_what_calls_made(draw: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "true")

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Keeping(draw), nn.Linear(4, 4))

    plain, inner = made(), made()
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), plain(x))
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(x), plain(x))


class Averaging(nn.Module):
    """Subtracts a running mean, which `write` keeps in tensors that are not buffers."""

    def __init__(self, write: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write
        self.mean, self.calls = (nn.Parameter(torch.zeros(size), requires_grad=False) for size in (4, 1))
        self.plain, self.listed = torch.zeros(4), [torch.zeros(4)]

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a - self.write(self, a.detach().mean(0))


def _data_replaced(m: Any, now: torch.Tensor) -> Any:
    m.mean.data = m.mean.data * 0.9 + now * 0.1
    return m.mean


def _data_written(m: Any, now: torch.Tensor) -> Any:
    m.mean.data.mul_(0.9).add_(now, alpha=0.1)
    return m.mean


def _data_added(m: Any, now: torch.Tensor) -> Any:
    m.calls.data += 1
    return now * m.calls


def _added(m: Any, now: torch.Tensor) -> Any:
    m.calls += 1
    return now * m.calls.detach()


def _new_parameter(m: Any, now: torch.Tensor) -> Any:
    m.mean = nn.Parameter(m.mean * 0.9 + now * 0.1, requires_grad=False)
    return m.mean


def _plain(m: Any, now: torch.Tensor) -> Any:
    return m.plain.mul_(0.9).add_(now, alpha=0.1)


def _listed(m: Any, now: torch.Tensor) -> Any:
    m.listed[0] += now
    return m.listed[0]


@pytest.mark.parametrize("write", [_data_replaced, _data_written, _data_added, _added, _new_parameter, _plain, _listed])
def test_tensors_that_are_no_buffers_are_written_once_a_call(
    write: Callable[[Any, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "true")

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Averaging(write), nn.Linear(4, 4))

    plain, inner = made(), made()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(inner, optimizer)
    others = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        for each, steps in ((model, optimizer), (plain, others)):
            steps.zero_grad()
            each(x).square().mean().backward()
            steps.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))


def test_a_trained_parameter_whose_data_a_call_replaces_is_an_error() -> None:
    class Normalized(nn.Linear):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            self.weight.data = nn.functional.normalize(self.weight.data, dim=1)
            return super().forward(a)

    inner = nn.Sequential(Normalized(4, 4), nn.Linear(4, 4))
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    before = inner[0].weight.detach().clone()
    with pytest.raises(TraceError, match=r"0\.weight"):
        model(torch.randn(3, 4))
    torch.testing.assert_close(inner[0].weight.detach(), before)
