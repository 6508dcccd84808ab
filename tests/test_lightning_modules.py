"""Which modules of a LightningModule are partitioned, as its source says; tests/e2e/test_lightning_jobs.py trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

from torchmetrics import MeanSquaredError  # noqa: E402 - comes with lightning

from pyrannc.integrations.lightning_modules import modules_to_partition  # noqa: E402
from rannd.errors import UsageError  # noqa: E402


class Base(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.act = nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()
        self.error = MeanSquaredError()

    def forward(self, x: Any) -> Any:
        return self.decode(self.encoder(x))

    def decode(self, x: Any) -> Any:
        return self.decoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.error(self(batch), batch) + self.decoder.weight.abs().sum()


class Calls(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.decode(batch).sum()


class Validates(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.encoder.forward(batch)


class ByAnotherName(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        encoder = self.encoder
        return encoder(batch)


class Inherits(Calls):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.act(batch)


class Overrides(Calls):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()


class Property(Base):
    @property
    def layers(self) -> list[nn.Module]:
        return [self.encoder, self.decoder]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [layer(batch) for layer in self.layers]


class Wraps(Base):
    @torch.no_grad()
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.encoder(batch)


class Lists(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [block(batch) for block in self.blocks.values()]


class OnlyChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.encoder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.encoder(batch)


class NoForward(Base):
    forward = pl.LightningModule.forward


class Bare(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


class BareWithoutForward(Bare):
    forward = pl.LightningModule.forward


def made_by_exec() -> Any:
    found: dict[str, Any] = {}
    exec("def training_step(self, batch, batch_idx):\n    return self.encoder(batch)", found)
    return type("MadeByExec", (Base,), {"training_step": found["training_step"]})


BOTH = ["encoder", "decoder"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Base, [""]),
        (Calls, BOTH),
        (Validates, BOTH),
        (ByAnotherName, BOTH),
        (Inherits, BOTH),
        (Overrides, [""]),
        (Property, BOTH),
        (Wraps, BOTH),
        (Lists, [*BOTH, "blocks.a.0", "blocks.a.2"]),
        (OnlyChild, ["encoder"]),
        (NoForward, BOTH),
        (Bare, [""]),
        (made_by_exec(), [""]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_partitioned(kind: Any, names: list[str]) -> None:
    assert modules_to_partition(kind()) == names


def test_parameters_without_a_module_and_a_forward() -> None:
    with pytest.raises(UsageError, match="BareWithoutForward has parameters of its own and no forward"):
        modules_to_partition(BareWithoutForward())
