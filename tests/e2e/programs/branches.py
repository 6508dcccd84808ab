"""Two ranks call models that branch on what is in their mini-batch: alike, differently, and one without rows."""

from __future__ import annotations

import sys

import torch
from torch import nn
from yardstick import RANK, SIZE, Plain, raises, same

import pyrannc
from rannd.errors import StepError

ROWS = 3


class Chosen(nn.Module):
    """One layer where something is masked, another where nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.some(x) if (labels < 0).any() else self.none(x)


class Branching(nn.Module):
    """Branches in one submodule; a check of its own that no call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.chosen, self.last = nn.Linear(8, 8), Chosen(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 7:
            raise ValueError("labels have to be below 7")
        return self.last(self.chosen(self.first(x).tanh(), labels).tanh())


class Loop(nn.Module):
    """A loop and branches over the values of the mini-batch, in the forward of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        numbers = labels.clone()
        for place in range(len(labels)):
            if labels[place] % 2 == 0:
                numbers[place] = 1
        return self.table(numbers.abs()) * x


class Whole(nn.Module):
    """Branches itself, around layers in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.layers(x if (labels < 0).any() else x * 2)


def batches(step: int, leasts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One mini-batch for each rank, of which the last label is given."""
    made = torch.Generator().manual_seed(step)
    found = []
    for least in leasts:
        x = torch.randn(ROWS, 8, dtype=torch.float64, generator=made)
        labels = torch.randint(0, 5, (ROWS,), generator=made)
        labels[-1] = least
        found.append((x, labels))
    return found


def train(net: nn.Module, *ways: list[int]) -> None:
    """Steps with these labels of the ranks, compared with one process."""
    plain = Plain(net, lambda given: torch.optim.SGD(given, lr=0.1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(net, optimizer)
    assert plain.optimizer is not None
    for step, leasts in enumerate(ways):
        given = batches(step, leasts)
        model(*given[RANK]).pow(2).sum().backward()
        plain.gradients([lambda model, mine=mine: model(*mine).pow(2).sum() for mine in given])
        for name, parameter in plain.model.named_parameters():
            same(model.get_param(name), parameter, f"step {step}: {name}")
            # What no branch has used has zeros where it is in an opaque operator, and no gradient elsewhere.
            zeros = torch.zeros_like(parameter)
            mine, other = (zeros if each is None else each for each in (model.get_param_grad(name), parameter.grad))
            same(mine, other, f"step {step}: gradient of {name}")
        for each in (optimizer, plain.optimizer):
            each.step()
            each.zero_grad()


def differs_at_once(stages: int) -> None:
    """The first mini-batches take different branches; later ones as they like."""
    torch.manual_seed(1)
    train(Branching().double(), [0, -1], [0, 0], [-1, -1], [-1, 0])


def differs_later(stages: int) -> None:
    """The first mini-batches take the same branches; the layers that are chosen are in one stage."""
    torch.manual_seed(1)
    train(Branching().double(), [0, 0], [-1, -1], [0, 0], [0, -1], [-1, -1], [-1, 0])


def loops(stages: int) -> None:
    """Where the model itself branches, all of it is one operator."""
    torch.manual_seed(1)
    train(Loop().double(), *([2 * step % 5, step % 5] for step in range(4)))


def without_rows(stages: int) -> None:
    """A rank without rows follows the other."""
    torch.manual_seed(1)
    net = Branching().double()
    plain = Plain(net).model
    model = pyrannc.RaNNCModule(net, None)
    for rows, least in (([2, 3], 0), ([0, 3], -1), ([3, 0], 0), ([0, 2], 0), ([2, 0], -1), ([1, 1], -1)):
        x, labels = torch.randn(rows[RANK], 8, dtype=torch.float64), torch.zeros(rows[RANK], dtype=torch.int64)
        labels[-1:] = least
        if rows[RANK]:
            torch.testing.assert_close(model(x, labels), plain(x, labels))
        else:
            assert model(x, labels).shape == (0, 8)


def divided(stages: int) -> None:
    """What a deployment has divided cannot become one operator, until the model is undeployed."""
    torch.manual_seed(1)
    net = Whole().double()
    plain = Plain(net).model
    model = pyrannc.RaNNCModule(net, None)
    for least in (0, -1):
        (x, labels) = batches(1, [least] * SIZE)[RANK]
        torch.testing.assert_close(model(x, labels), plain(x, labels))
    x, labels = batches(1, [0, -1])[RANK]
    raises(StepError, "its parameters are already in stages 0, 1. Call model.undeploy()", lambda: model(x, labels))
    torch.testing.assert_close(model(x, labels * 0), plain(x, labels * 0))


assert SIZE == 2
globals()[sys.argv[1]](int(sys.argv[2]))
print(f"{sys.argv[1]} is right on rank {RANK}", flush=True)
