"""pyrannc.AveragedModel equals torch's in one process (arguments: stages, folder, and what to do)."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from yardstick import RANK, SIZE, Plain, batches, raises, same

import pyrannc
from rannd.errors import StepError, UsageError

STAGES, FOLDER, WHAT = int(sys.argv[1]), sys.argv[2], sys.argv[3]


class Net(nn.Module):
    """With buffers, tied weights, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.middle[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.norm(self.first(x))))
        return result


WAYS: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "own": {"avg_fn": lambda average, value, count: 0.7 * average + 0.3 * value},
    "buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def network(rank: int = 0) -> nn.Module:
    torch.manual_seed(5 + rank)
    return Net().double()


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def compare(ema: pyrannc.AveragedModel, other: swa_utils.AveragedModel, what: str) -> None:
    found, wanted = ema.state_dict(rank0_only=False), other.state_dict()
    assert list(found) == list(wanted), what
    for name, value in wanted.items():
        if "num_batches_tracked" not in name:  # the plain model has seen the batches of all ranks one by one
            same(found[name], value, f"{what}: {name}")


def step(model: Any, optimizer: torch.optim.Optimizer, plain: Plain, number: int) -> None:
    optimizer.zero_grad()
    assert plain.optimizer is not None
    plain.optimizer.zero_grad()
    given = batches(number)
    model(given[RANK]).pow(2).sum().backward()
    plain.backward(given)
    optimizer.step()
    plain.optimizer.step()


def eval_norm(*models: nn.Module) -> None:
    """Statistics of a whole batch are another matter: here they are constant."""
    for model in models:
        model.train()
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.eval()


if WHAT == "train":
    for name, options in WAYS.items():
        for before_wrapping in (True, False):
            net = network(RANK)  # ranks begin with other values: those of rank 0 count
            plain = Plain(network(), make)
            optimizer = make(net.parameters())
            model: Any = pyrannc.RaNNCModule(net, optimizer)
            eval_norm(net, plain.model)
            other = swa_utils.AveragedModel(plain.model, **options)
            if before_wrapping:
                ema = pyrannc.AveragedModel(model, **options)
                ema.update_parameters(model)
                other.update_parameters(plain.model)
            for number in range(4):
                step(model, optimizer, plain, number)
                if number == 0 and not before_wrapping:
                    ema = pyrannc.AveragedModel(model, **options)
                if number == 2:
                    assert len(model.deployment.stages) == STAGES
                    model.undeploy()
                if number == 3:
                    step(model, optimizer, plain, 33)
                with torch.no_grad():
                    for each in (net, plain.model):
                        mean = dict(each.named_buffers())["norm.running_mean"]
                        if not hasattr(type(mean), "refusal"):  # another rank's
                            mean.fill_(number)
                ema.update_parameters()
                other.update_parameters(plain.model)
                compare(ema, other, f"{name} {number}")
            x = batches(99)[RANK]
            weights = [p.detach().clone() for p in model.parameters(own=True)]
            with torch.no_grad():
                found = ema(x)
                same(found, other.module(x), f"{name}: evaluation")
                with ema.average_parameters():
                    same(model(x), found, f"{name}: inside")
                    raises(StepError, "average_parameters", ema.update_parameters)
                same(model(x), plain.model(x), f"{name}: after")
            for p, kept in zip(model.parameters(own=True), weights, strict=True):
                assert torch.equal(p, kept)
            loaded = swa_utils.AveragedModel(network(3))
            loaded.load_state_dict(ema.state_dict(rank0_only=False))
            eval_norm(loaded.module)
            same(loaded.module(x), found, f"{name}: loaded by torch")
            ema.load_state_dict(swa_utils.AveragedModel(network(4)).state_dict() | {"n_averaged": torch.tensor(2)})
            ema.load_state_dict(other.state_dict())
            compare(ema, other, f"{name}: loaded")
            wrong = other.state_dict()
            wrong["module.first.bias"] = torch.zeros(3)
            raises(UsageError, "does not fit the averages", partial(ema.load_state_dict, wrong))
            compare(ema, other, f"{name}: as it was")
            raises(UsageError, "another model", partial(ema.update_parameters, nn.Linear(2, 2)))
            pyrannc.clear()
    raises(UsageError, "wrap the model first", lambda: pyrannc.AveragedModel(network()))
else:  # save; load at other ranks and stages, before or after the first call, each also with other steps before
    net, plain = network(RANK), Plain(network(), make)
    optimizer = make(net.parameters())
    model = pyrannc.RaNNCModule(net, optimizer)
    eval_norm(net, plain.model)
    options = WAYS["ema"]
    ema, other = pyrannc.AveragedModel(model, **options), swa_utils.AveragedModel(plain.model, **options)
    if WHAT == "save":
        for number in range(3):
            step(model, optimizer, plain, number)
            ema.update_parameters()
            other.update_parameters(plain.model)
        pyrannc.save_checkpoint(FOLDER, model, optimizer, averaged=ema, extra=RANK)
        if RANK == 0:
            torch.save([plain.model.state_dict(), other.state_dict()], f"{FOLDER}.plain")
        pyrannc.barrier()
    else:
        if WHAT == "after":
            step(model, optimizer, copy.deepcopy(plain), 50)
            ema.update_parameters()
        pyrannc.load_checkpoint(FOLDER, model, optimizer, averaged=ema, rng=False)
        states = torch.load(f"{FOLDER}.plain")
        plain.model.load_state_dict(states[0])
        other.load_state_dict(states[1])
        compare(ema, other, "from a checkpoint")
        model(batches(1)[RANK])
        compare(ema, other, "from a checkpoint, deployed")
        assert len(model.deployment.stages) == min(STAGES, SIZE)
        ema.update_parameters()
        other.update_parameters(plain.model)
        compare(ema, other, "from a checkpoint, updated")
print(f"averages are right on rank {RANK}", flush=True)
