"""Averages by a script's own means: right where a rank holds the whole model (argument: 1 stage), else an error."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pyrannc
from rannd.errors import UsageError

STAGES = int(sys.argv[1])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()  # layers of one shape: any pair would fit


def zipped(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for e, p in zip(average.parameters(), model.parameters(), strict=False):
            e.mul_(0.9).add_(p, alpha=0.1)


def zipped_states(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            average.state_dict()[name].lerp_(p.detach(), 0.1)


def update(average: nn.Module, model: nn.Module) -> None:
    assert isinstance(average, AveragedModel)
    average.update_parameters(model)


def ema(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


ways: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module, nn.Module], None]]] = {
    "zip": (copy.deepcopy, zipped),
    "state": (copy.deepcopy, zipped_states),
    "swa": (AveragedModel, update),
    "ema": (ema, update),
}
for name, (make, average) in ways.items():
    net, plain = network(), network()
    before, wanted = make(net), make(plain)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (net, plain)]
    model = pyrannc.RaNNCModule(net, optimizers[0])
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))  # on every rank
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
        average(wanted, plain)
        if STAGES == 1:
            average(before, model)
            continue
        assert len(model.deployment.stages) == STAGES
        with pytest.raises(UsageError, match=r"pyrannc\.AveragedModel averages"):
            average(before, model)
        with pytest.raises(UsageError, match=r"pyrannc\.AveragedModel"):
            make(model)
    if STAGES == 1:
        for found, right in zip(before.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=0)
    print(f"{name} is right", flush=True)
    pyrannc.clear()
