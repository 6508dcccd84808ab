"""Trains a model whose values are spoilt: with "planted", those that are computed; else those that are recomputed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import pyrannc
from rannd.runtime.execution.stage import Computing

run = Computing._run
planted = "planted" in sys.argv


def spoilt(self: Computing, step: Any, piece: int, number: int, *rest: Any) -> Any:
    """What the second step computes, or what is computed with gradients again, is a little too large."""
    outputs, after = run(self, step, piece, number, *rest)
    if step.number == 1 if planted else self._stage.segments[number].recompute and torch.is_grad_enabled():
        outputs = {node: value * 1.001 for node, value in outputs.items()}
    return outputs, after


Computing._run = spoilt  # type: ignore[method-assign]
torch.manual_seed(0)
inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
