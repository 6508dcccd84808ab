"""shared_rank.py one | train: a rank that trains models in stages, and plays the same training for all ranks at once.

What a rank compares with is the mean of all ranks' gradients, as DistributedDataParallel computes it, in float64 and in
one process. Prints the largest difference of each case.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pyrannc
from _gpu.alike import adamw, distance
from _gpu.machine import variables
from _gpu.models import Convolutions, Mlp, Text, images, loss_of, numbers, on, tokens

RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model, its mini-batches by seed, and a plan."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    plan: dict[str, str]


def _tied() -> nn.Module:
    return Text(3, 32, 97, 8)


def _texts(seed: int) -> dict[str, Tensor]:
    return tokens(seed, 4, 8, 97)


def cases() -> list[Case]:
    """Those of this number of ranks."""
    if SIZE == 1:
        return [Case("GPT-2", _tied, _texts, {})]
    plans = {"replicas": {"PARTITION_NUM": "1"}, "2 stages": {"PARTITION_NUM": "2", "PIPELINE_NUM": "2"}}
    if SIZE > 2:
        plans[f"{SIZE} stages"] = {"PARTITION_NUM": str(SIZE), "PIPELINE_NUM": "2", "SCHEDULE": "gpipe"}
    listed = [Case(f"tied weights, {name}", _tied, _texts, plan) for name, plan in plans.items()]
    for name, plan in plans.items():
        whole = {**plan, "PIPELINE_NUM": "1"}
        listed.append(Case(f"BatchNorm, {name}", Convolutions, lambda seed: images(seed, 4), whole))
    listed.append(Case("loss outside, 2 stages", Mlp, lambda seed: numbers(seed, 4), plans["2 stages"]))
    again = {**plans["2 stages"], "CHECKPOINTING": "true"}
    return [*listed, Case("tied weights, 2 stages, recomputation", _tied, _texts, again)]


class Together:
    """All ranks' training in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.master = model
        self.optimizer = adamw(model.parameters())

    def step(self, batches: list[dict[str, Tensor]]) -> Tensor:
        """A step; returns the mean loss."""
        self.optimizer.zero_grad()
        replicas = [copy.deepcopy(self.master) for _ in batches]
        losses = [loss_of(replica(**batch)) for replica, batch in zip(replicas, batches, strict=True)]
        for loss in losses:
            (loss / len(losses)).backward()
        for parameter, *others in zip(self.master.parameters(), *(each.parameters() for each in replicas), strict=True):
            parameter.grad = torch.stack([each.grad for each in others if each.grad is not None]).sum(0)
        for buffer, first in zip(self.master.buffers(), replicas[0].buffers(), strict=True):
            buffer.copy_(first)
        self.optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean()


def train(case: Case) -> float:
    """Largest difference of losses, gradients, parameters and buffers over some steps."""
    torch.manual_seed(0)
    inner = case.make().double()
    optimizer = adamw(inner.parameters())
    together = Together(copy.deepcopy(inner))
    model = pyrannc.RaNNCModule(inner, optimizer)
    worst = 0.0
    for step in range(STEPS):
        batches = [case.batch(100 * step + rank) for rank in range(SIZE)]
        optimizer.zero_grad()
        output = model(**on(batches[RANK], model.device))
        loss_of(output).backward()
        loss = together.step(batches)
        if not isinstance(output, Tensor) or output.ndim == 0:
            worst = max(worst, distance(loss_of(output), loss))
        for name, parameter in together.master.named_parameters():
            mine = model.get_param_grad(name)
            assert mine is not None
            assert parameter.grad is not None
            worst = max(worst, distance(mine, parameter.grad))
        optimizer.step()
    state = model.state_dict(rank0_only=False)
    worst = max(worst, *(distance(state[name], value) for name, value in together.master.state_dict().items()))
    stages = len(model.deployment.stages)
    assert stages == int(case.plan.get("PARTITION_NUM", 1)), f"{case.name}: the plan has {stages} stages"
    pyrannc.clear()
    return worst


def main() -> None:
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    for case in cases():
        if only not in case.name:
            continue
        with variables(TRANSPORT=os.environ["RANNC_TRANSPORT"], **case.plan):
            print(f"worst {train(case):.3g} in {case.name}", flush=True)
    print(f"trained on rank {RANK}", flush=True)


if __name__ == "__main__":
    main()
