"""Python branches on what is in the call's tensors: every call runs the branch that the model itself would take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import TraceError
from rannd.graph.tracing.frontend import trace
from rannd.runtime.calls.call_tracing import CallTracing
from rannd.runtime.traces import branch_ways, trace_provider


class Branching(nn.Module):
    """One layer where something is masked, another where nothing is; labels have to be below 7."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 7:
            raise ValueError("labels have to be below 7")
        layer = self.some if (labels < 0).any() else self.none
        return (layer(x) * labels[:, None]).mean()


def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled with one entry for each trace."""
    found: list[object] = []
    trace = CallTracing._trace

    def counted(self: CallTracing, *args: object) -> object:
        found.append(None)
        return trace(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CallTracing, "_trace", counted)
    return found


def test_each_call_takes_its_own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = traces(monkeypatch)
    plain = Branching()
    model = pyrannc.RaNNCModule(copy.deepcopy(plain), None)
    for rows, least, graphs in ((3, 0, 1), (4, -1, 2), (5, 0, 2), (1, -2, 2), (2, 1, 2)):
        x, labels = torch.randn(rows, 4), torch.full((rows,), 5)
        labels[-1] = least
        torch.testing.assert_close(model(x, labels), plain(x, labels))
        model(x, labels).backward()
        assert len(counted) == graphs
    plain.some.weight.grad = None
    plain(x, labels).backward()
    for branch in ("some", "none"):
        assert getattr(model, branch).weight.grad is not None


def test_what_branches_in_ever_new_ways_becomes_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for row in x:
                if row.sum() > 0:
                    x = x * 2
            return self.layer(x)

    counted = traces(monkeypatch)
    plain = Loop()
    model = pyrannc.RaNNCModule(copy.deepcopy(plain), None)
    for number in range(10):
        x = torch.tensor([[1.0 if number >> row & 1 else -1.0] * 4 for row in range(4)])
        torch.testing.assert_close(model(x), plain(x))
        assert len(counted) == min(number, branch_ways.MOST_WAYS) + 1


def test_the_models_own_error_for_a_later_call() -> None:
    model = pyrannc.RaNNCModule(Branching(), None)
    x = torch.randn(5, 4)
    before = model(x, torch.arange(5))
    with pytest.raises(TraceError, match="ValueError: labels have to be below 7"):
        model(x, torch.tensor([0, 1, 2, 3, 7]))
    torch.testing.assert_close(model(x, torch.arange(5)), before)


def test_branches_that_lead_to_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 2.0
            if x.sum() > 0:
                factor *= 1
            return self.layer(x) * factor

    counted = traces(monkeypatch)
    model = pyrannc.RaNNCModule(Same(), None)
    for sign in (1, -1, 1, -1):
        model(torch.full((3, 4), float(sign)))
    assert len(counted) == 2


def test_a_cached_trace_for_another_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is kept under what is known before tracing; whether a call takes its branches is asked then."""
    monkeypatch.setenv("RANNC_CACHE", "on")
    traced: list[object] = []

    def counted(*args: Any) -> Any:
        traced.append(None)
        return trace(*args)

    monkeypatch.setattr(trace_provider, "trace", counted)
    for least, count in ((0, 1), (0, 1), (-1, 2)):
        torch.manual_seed(1)
        plain = Branching()
        model = pyrannc.RaNNCModule(copy.deepcopy(plain), None)
        x, labels = torch.randn(3, 4), torch.tensor([1, 2, least])
        torch.testing.assert_close(model(x, labels), plain(x, labels))
        assert len(traced) == count
        pyrannc.clear()
