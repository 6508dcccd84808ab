"""What programs/elastic.py leaves behind, compared with the same training in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc

EPOCHS, STEPS = 3, 24


class Outcome:
    """The results in a folder.

    Args:
        folder: Of the job.
        kind: "sgd" or "adam".
    """

    epochs = EPOCHS

    def __init__(self, folder: Path, kind: str = "sgd") -> None:
        self.folder, self.kind = folder, kind

    def losses(self) -> dict[int, list[tuple[float, int]]]:
        """(loss, ranks) of each step, as often as it was made."""
        found: dict[int, list[tuple[float, int]]] = {}
        for line in (self.folder / "losses").read_text().splitlines():
            step, loss, ranks = line.split()
            found.setdefault(int(step), []).append((float(loss), int(ranks)))
        return found

    def check(self) -> None:
        """Losses of all steps, and the parameters at the end, are those of one process that is not stopped."""
        losses, parameters, rate = reference(self.kind)
        found = self.losses()
        assert sorted(found) == list(range(1, STEPS + 1))
        for step, loss in enumerate(losses, 1):
            for each, _ in found[step]:
                assert each == pytest.approx(loss, rel=1e-9), step
        end = torch.load(self.folder / "end.pt")
        assert end["step"] == STEPS
        assert end["lr"] == [pytest.approx(rate)]
        for name, value in parameters.items():
            torch.testing.assert_close(end["model"][name], value, rtol=1e-9, atol=1e-12)

    def ranks_of(self) -> list[int]:
        """Number of ranks of each step that was made last."""
        return [made[-1][1] for _, made in sorted(self.losses().items())]


def reference(kind: str) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses, parameters and learning rate of the same training in plain torch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
            model = nn.ModuleDict({"layers": layers, "head": nn.Linear(16, 1)})
            x = torch.randn(88, 16)
        y = x.sum(1).sin()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if kind == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
        losses = []
        sampler = pyrannc.ElasticSampler(range(88), 12, seed=7, rank=0, ranks=1)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for rows in sampler:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model["head"](model["layers"](x[rows])).squeeze(1), y[rows])
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
        return losses, dict(model.state_dict()), scheduler.get_last_lr()[0]
    finally:
        torch.set_default_dtype(before)
