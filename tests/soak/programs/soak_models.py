"""Models of the soak: small, in float64, so that a job under another plan has the same losses but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 16
"""Samples of a rank's mini-batch."""


class Tokens(nn.Module):
    """Embedding, attention, and a loss that the model computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def network(name: str) -> nn.Module:
    """A model with the same initial values in each process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(17)
    if name == "tokens":
        return Tokens()
    if name == "images":
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 64, 10),
        )  # fmt: skip
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(256, 8))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One with state, but for the images, whose parameters alone are saved."""
    if name == "images":
        return torch.optim.SGD(model.parameters(), 0.01)
    if name == "tokens":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def batch(name: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank trains with in a step, counted from 1."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    if name == "tokens":
        tokens = torch.randint(0, 32, (ROWS, 17), generator=numbers)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (ROWS, 3, 16, 16) if name == "images" else (ROWS, 256)
    classes = 10 if name == "images" else 8
    return torch.randn(*shape, generator=numbers), torch.randint(0, classes, (ROWS,), generator=numbers)
