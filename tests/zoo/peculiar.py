"""Models written with torch alone whose code is hard to trace: each shows one reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, relu
from torch.utils.checkpoint import checkpoint

from zoo import batches
from zoo.batches import CLASSES, TOKENS, WIDTH
from zoo.entry import Entry
from zoo.plain import residual


class Straight(torch.autograd.Function):
    """Rounds; the gradient goes straight through where the input was in range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed: Tensor = gradients[0] * (x.abs() <= 1)
        return passed


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = Straight.apply(x)  # type: ignore[no-untyped-call]
        return rounded


class Quantised(nn.Module):
    """Rounds between its layers, with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(residual(), Rounded(), residual(), Rounded(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), target)


class Router(nn.Module):
    """Takes another way where the batch as a whole is cold."""

    def __init__(self) -> None:
        super().__init__()
        self.warm, self.cold = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.warm(x)) if x.mean() > 0 else self.cold(x)


class ControlFlow(nn.Module):
    """Its way depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(residual() for _ in range(3)))
        self.router = Router()
        self.after = nn.Sequential(*(residual() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(self.after(self.router(self.before(x)))), target)


@dataclass
class Scored:
    """An output that nobody told torch about."""

    loss: Tensor
    scores: dict[str, Tensor]
    model: str


class Dataclass(nn.Module):
    """Hands back a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = residual(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Scored:
        logits = self.head(x + self.body(x))
        return Scored(cross_entropy(logits, target), {"logits": logits, "best": logits.argmax(1)}, "scored")


class Teacher(nn.Module):
    """Keeps moving averages of its features and of how often it ran."""

    mean: Tensor
    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = residual(), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.runs += 1
        return cross_entropy(self.head(hidden - self.mean), target)


class Codebook(nn.Module):
    """Replaces features by their nearest code; the codes follow the features, without gradients."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = residual(), residual()
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = nn.functional.one_hot(nearest, 6).to(hidden.dtype)
                self.codes.lerp_((chosen.T @ hidden) / chosen.sum(0).clamp(min=1)[:, None], 0.1)
        found = self.decoder(hidden + (codes - hidden).detach())
        return mse_loss(found, x) + 0.25 * mse_loss(hidden, codes)


class BatchNorms(nn.Module):
    """One BatchNorm that is used twice, cumulative, and one without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.BatchNorm1d(WIDTH, momentum=None)
        self.bare = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([x, x * x, x.abs()])  # a batch of one has enough samples then
        x = relu(self.twice(self.first(x)))
        hidden = self.bare(self.twice(self.first(x))).view(3, -1, WIDTH).sum(0)
        return cross_entropy(self.head(hidden), target)


class Experts(nn.Module):
    """Each token goes to the expert that the router likes best: a loop over experts, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = torch.where(choice == number)[0]
            out[chosen] = expert(flat[chosen]) * weight[chosen, None]
        return out.view_as(x)


class LoopedExperts(nn.Module):
    """A mixture of experts by hand between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        x = self.embed(text)
        return cross_entropy(self.head((x + self.experts(x)).mean(1)), target)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=number == 2)
        return cross_entropy(self.head(x), target)


PECULIAR = tuple(
    Entry(name=name, family="torch", build=build, batch=batch)
    for name, build, batch in (
        ("autograd.Function", Quantised, batches.features),
        ("control flow", ControlFlow, batches.features),
        ("dataclass", Dataclass, batches.features),
        ("moving averages", Teacher, batches.features),
        ("codebook", Codebook, lambda rows: {"x": torch.randn(rows, WIDTH)}),
        ("BatchNorm", BatchNorms, batches.features),
        ("experts, looped", LoopedExperts, batches.text),
        ("checkpointed", Checkpointed, batches.features),
    )
)
