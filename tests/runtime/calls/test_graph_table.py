"""A model with more graphs than are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import StepError
from rannd.runtime.calls import graph_table


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return self.layer(x) * factor


def test_the_graph_that_was_not_used_for_longest_goes_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_table, "MOST_GRAPHS", 3)
    inner = Scaled()
    model = pyrannc.RaNNCModule(inner)
    x = torch.randn(2, 4)
    kept = model(x, 1)
    for factor in (2, 3, 1, 4, 2, 1, 3):
        torch.testing.assert_close(model(x, factor), (x @ inner.layer.weight.T + inner.layer.bias) * factor)
        assert len(model._session._graphs._known) <= 3
    kept.sum().backward()  # its graph may be gone; what the call needs is not
    assert inner.layer.weight.grad is not None
    torch.testing.assert_close(inner.layer.bias.grad, torch.full((4,), 2.0))


def test_a_backward_through_a_dropped_graph_is_an_error_after_undeploy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_table, "MOST_GRAPHS", 2)
    model = pyrannc.RaNNCModule(Scaled())
    x = torch.randn(2, 4)
    kept = model(x, 1)
    model(x, 2)
    model(x, 3)
    model.undeploy()
    with pytest.raises(StepError, match=r"before model\.undeploy"):
        kept.sum().backward()
