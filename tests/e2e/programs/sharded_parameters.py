"""Parameters of which each rank has a piece (ZeRO 3): what scripts do with them, compared with one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.plan.stage_costs import estimate
from rannd.runtime.parameters.absent import part_of

estimate.SEGMENT = 0  # bytes: each block is a segment, as in a large model
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
ROWS = 8
"""Of the global batch."""


class Model(nn.Module):
    """Tied weights, layers that are frozen for a while, a scalar, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 20)
        self.first = nn.Linear(20, 70)
        self.middle = nn.Linear(70, 20)
        self.cut = pyrannc.CutPoint()  # another branch reads `first` and `middle` once more, on the same stage
        self.norm = nn.LayerNorm(20)
        self.out = nn.Linear(20, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, twice: bool = False, views: bool = False) -> Any:
        if views:
            return self.middle(torch.tanh(self.first.weight.t())), self.first.weight.t(), self.first.bias
        if self.training:
            self.seen += 1.0
        hidden = self.embed(tokens) * self.scale
        hidden = hidden + self.middle(torch.tanh(self.first(hidden)))
        if twice:
            hidden = hidden + self.middle(torch.tanh(self.first(hidden)))
        logits = self.out(self.norm(self.cut(hidden)))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = Model().double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def batch(number: int) -> torch.Tensor:
    return torch.randint(11, (ROWS, 6), generator=torch.Generator().manual_seed(number))


def mine(number: int) -> torch.Tensor:
    return batch(number).tensor_split(WORLD)[RANK]


plain, plain_optimizer = build()
inner, optimizer = build()
model: Any = pyrannc.RaNNCModule(inner, optimizer)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12), (what, (found - wanted).abs().max())


def check(when: str) -> None:
    state = model.state_dict()
    if RANK == 0:
        for name, value in plain.state_dict().items():
            close(state[name], value, f"{when}: {name}")


def step(number: int, **given: Any) -> None:
    for one, other, tokens in ((plain, plain_optimizer, batch(number)), (model, optimizer, mine(number))):
        other.zero_grad()
        one(tokens, **given).backward()
        other.step()


def refused(what: str, call: Any) -> None:
    told = ""
    try:
        call()
    except UsageError as exc:
        told = str(exc)
    assert "ZeRO stages 2 and 3" in told or "has a piece" in told, (what, told)


def main() -> None:
    step(0)
    step(1)
    check("trained")
    assert model.deployment.zero == 3
    for parameter in (inner.first.weight, inner.embed.weight):
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
    close(model.get_param("first.weight"), plain.first.weight, "get_param")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())

    # by elements, of those that this rank holds
    held = dict(model.named_parameters(own=True))
    ramp = torch.arange(1400.0).view(20, 70)
    with torch.no_grad():
        for named in (dict(plain.named_parameters()), held):
            if "first.weight" in named:
                named["first.weight"].mul_(0.9)
            if "first.bias" in named:
                named["first.bias"].copy_(torch.arange(70.0) / 100)
            if "middle.weight" in named:
                named["middle.weight"].data.add_(ramp, alpha=1e-5)
    check("by elements")
    for parameter in held.values():
        if part_of(parameter) is not None:
            refused("norm", parameter.norm)
            refused("deepcopy", lambda: copy.deepcopy(parameter))  # noqa: B023
    assert WORLD > 2 or part_of(inner.first.weight) is not None
    assert inner.first.weight.new_zeros(2, 3).sum().item() == 0

    # other graphs: evaluation, another branch
    plain.eval()
    model.eval()
    with torch.no_grad():
        close(model(mine(2)), plain(batch(2)), "evaluation")
        for found, wanted in zip(model(mine(2), views=True), plain(batch(2), views=True), strict=True):
            close(found, wanted, "views of parameters")
    plain.train()
    model.train()
    step(3, twice=True)
    check("another branch")

    # averages
    averaged = pyrannc.AveragedModel(model, avg_fn=lambda old, new, _: old * 0.7 + new * 0.3)
    theirs = torch.optim.swa_utils.AveragedModel(plain, avg_fn=lambda old, new, _: old * 0.7 + new * 0.3)
    for number in range(4, 7):
        step(number)
        averaged.update_parameters()
        theirs.update_parameters(plain)
    found = averaged.state_dict()
    if RANK == 0:
        for name, value in theirs.state_dict().items():
            close(found[name], value, f"average of {name}")
    with averaged.average_parameters(), torch.no_grad():
        model.eval()
        theirs.eval()
        close(model(mine(7)), theirs(batch(7)), "evaluation of averages")
        model.train()
    check("after averages")

    # frozen for a while
    for one in (plain, inner):
        one.middle.requires_grad_(False)
    step(8)
    check("frozen")
    for one in (plain, inner):
        one.middle.requires_grad_(True)
    step(9)
    check("thawed")

    # states
    state = copy.deepcopy(plain.state_dict())
    step(11)
    model.load_state_dict(state)
    plain.load_state_dict(state)
    check("loaded")

    model.undeploy()
    for name, parameter in inner.named_parameters():
        assert type(parameter) is nn.Parameter
        close(parameter, plain.get_parameter(name), f"undeployed {name}")
    step(12)
    check("deployed again")
    print(f"rank {RANK} has right parameters under {len(model.deployment.stages)} stages, ZeRO {model.deployment.zero}")


main()
