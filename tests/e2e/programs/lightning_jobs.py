"""Lightning's Trainer with strategy="rannc", compared with strategy="ddp".

usage: lightning_jobs.py {parity|bf16|resume} FOLDER {child|itself}

child   the layers are in one child of the LightningModule
itself  they are in several, and in the LightningModule, whose forward is partitioned

parity  20 steps in doubles: accumulation, clipping, a schedule of the learning rate, validation, checkpoints, test,
        predictions
bf16    the same in mixed precision
resume  goes on from the checkpoint after 10 steps that `parity` has left, on any number of ranks
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from yardstick import raises, same_runs

import pyrannc
from pyrannc.integrations.lightning import RaNNCMetrics, RaNNCStrategy
from rannd.errors import RanndError, StepError

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
WAY, FOLDER, LAYOUT = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
WIDTH, GLOBAL, STEPS, ADDED = 16, 8, 20, 2
DTYPE = torch.float32 if WAY == "bf16" else torch.float64
SHOWN = {"bf16": 3e-2}.get(WAY, 1e-9)


class Net(pl.LightningModule):
    """A module as its author has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(DTYPE)
        self.register_buffer("scale", torch.ones((), dtype=DTYPE))
        self.found: list[tuple[str, Tensor]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]) * self.scale, batch[1]) * (1 + batch_idx % 2)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("valid", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Place(pl.LightningModule):
    """Has a buffer and no parameters. A LightningModule in another one has its Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.arange(WIDTH, dtype=DTYPE) / WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.added
        return outputs


class Itself(Net):
    """Has layers, a parameter, a metric, what callbacks append to, and an attribute that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        whole, self.net = self.net, None  # type: ignore[assignment]
        self.first, self.last = whole[:2], whole[2:]
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=DTYPE))
        self.gain, self.calls = 1.0, 0
        self.seen: list[tuple[int, int]] = []
        self.same, self.none, self.scaled = self.first, None, True
        self.place, self.act = Place(), nn.Tanh()
        self.error = MeanSquaredError().set_dtype(torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.act(self.place(self.same(inputs))) * self.gain + self.shift)
        return outputs if self.none is None and hasattr(self, "scaled") else 2 * outputs

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        wrapper = getattr(self.forward, "wrapper", None)
        assert wrapper is None or not wrapper.module.training, "the model has the mode of the LightningModule"

    def _shared_step(self, batch_idx: int) -> None:
        self.seen.append((self.global_rank, batch_idx))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self.forward(batch[0]) if batch_idx % 2 else self(batch[0])
        self._shared_step(batch_idx)
        self.error(outputs, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        loss = F.mse_loss(outputs, batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.gain = 1.0 if batch_idx < 8 else 0.5
        if batch_idx == 8:
            self.act = nn.ReLU()
        if batch_idx == 12:
            del self.scaled

    def on_train_epoch_end(self) -> None:
        self.found.append(("error", self.error.compute()))


def count(module: Any, *_: Any) -> None:
    module.calls += module.training


class Encoder(pl.LightningModule):
    """Computes with its layers, not with itself, and does not name them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4, dtype=DTYPE), nn.Linear(4, WIDTH, dtype=DTYPE)

    def forward(self, inputs: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(inputs)
        return encoded

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = batch[0]
        for layer in self.children():
            outputs = layer(outputs)
        loss = F.mse_loss(outputs, batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Reading(Encoder):
    """Reads the Trainer in its forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.decoder(self.encoder(inputs)) * (1 + self.current_epoch)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Large(nn.Module):
    """Returns its loss, and what is too large to be sent unasked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH, dtype=DTYPE), nn.Linear(WIDTH, 9000, dtype=DTYPE)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        large = self.last(self.first(inputs).tanh())
        return large.square().mean(), large


class Reads(Net):
    """Reads a large output beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Large()  # type: ignore[assignment]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, large = self.net(batch[0])
        self.log("loss", loss)
        self.found.append(("large", large.detach().mean()))
        return loss  # type: ignore[no-any-return]


class Notes(Callback):
    """Notes what is logged."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        pl_module.found.append(("loss", trainer.callback_metrics["loss"].detach().double().clone()))
        pl_module.found.append(("rate", torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.found.append(("valid", trainer.callback_metrics["valid"].detach().double().clone()))


def loader(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(count, WIDTH, dtype=DTYPE, generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(*tensors), batch_size=GLOBAL // SIZE)


def trainer(strategy: Any, folder: Path, **options: Any) -> pl.Trainer:
    logger = CSVLogger(folder, version=0)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)
    devices = {"devices": SIZE} if strategy == "ddp" else {}
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        **devices,
        max_epochs=1,
        accumulate_grad_batches=ADDED,
        gradient_clip_val=0.05,
        val_check_interval=10,
        precision="bf16-mixed" if WAY == "bf16" else "64-true" if torch.float64 == DTYPE else "32-true",
        callbacks=[Notes(), saves, *([RaNNCMetrics()] if strategy == "rannc" else [])],
        logger=logger if strategy == "rannc" else False,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        **options,
    )


def fit(strategy: str, checkpoint: Path | None = None) -> tuple[Net, dict[str, Tensor]]:
    folder = FOLDER / (strategy if checkpoint is None else f"{strategy}, resumed")
    net, one = {"child": Net, "itself": Itself}[LAYOUT](), trainer(strategy, folder)
    if LAYOUT == "itself":
        net.register_forward_hook(count)
    one.fit(net, loader(STEPS * ADDED * GLOBAL, 1), loader(24, 2), ckpt_path=checkpoint)
    one.save_checkpoint(folder / "last.ckpt")
    for tester in (one, trainer(strategy, folder)):
        (tested,) = tester.test(net, loader(24, 3), verbose=False)
        net.found.append(("tested", torch.tensor(tested["valid"])))
        predicted: list[Any] = tester.predict(net, loader(24, 4)) or []
        net.found.append(("predicted", torch.cat(predicted)))
    one.strategy.barrier()
    return net, torch.load(folder / "last.ckpt", weights_only=True)


def compare(ours: tuple[Net, Any], theirs: tuple[Net, Any]) -> None:
    same_runs((ours[0].found, ours[1]), (theirs[0].found, theirs[1]), SHOWN)


def parity() -> None:
    ours = fit("rannc")
    compare(ours, fit("ddp"))
    if LAYOUT == "child":
        assert isinstance(ours[0].net, pyrannc.RaNNCModule)
    if WAY == "parity" and LAYOUT == "child":
        large_outputs()
    elif WAY == "parity":
        assert isinstance(ours[0], Itself)
        assert ours[0].calls == STEPS * ADDED // 2  # self.forward(..) has no hooks
        state = dict(ours[0].state_dict())
        if RANK == 0:
            torch.testing.assert_close(state, ours[1]["state_dict"], rtol=0, atol=0)
        twice()
        for kind, told in (
            (Encoder, "Encoder.training_step does not call self(..)"),
            (Reading, "self.current_epoch is not known where"),
        ):
            raises(RanndError, told, lambda kind=kind: trainer("rannc", FOLDER).fit(kind(), loader(10 * GLOBAL, 1)))


def twice() -> None:
    """Validated, then trained by two Trainers."""
    found = []
    for strategy in ("rannc", "ddp"):
        net = Itself()
        trainer(strategy, FOLDER / "twice").validate(net, loader(24, 3), verbose=False)
        for seed in (1, 2):
            trainer(strategy, FOLDER / "twice").fit(net, loader(10 * GLOBAL, seed))
        found.append(torch.stack([value for what, value in net.found if what == "loss"]))
    assert len(found[0]) == 20
    torch.testing.assert_close(*found, rtol=SHOWN, atol=SHOWN)


def large_outputs() -> None:
    """Are sent to who reads them if that is asked for."""
    folder = FOLDER / "large"
    told = 'with Lightning: RaNNCStrategy(outputs="all")'
    raises(StepError, told, lambda: trainer("rannc", folder).fit(Reads(), loader(10 * GLOBAL, 1)))
    found = []
    for strategy in (RaNNCStrategy(outputs="all"), "ddp"):
        net = Reads()
        trainer(strategy, folder).fit(net, loader(10 * GLOBAL, 1))
        found.append(torch.stack([value for what, value in net.found if what == "large"]))
    assert len(found[0]) == 10
    torch.testing.assert_close(*found, rtol=SHOWN, atol=SHOWN)


def resume() -> None:
    checkpoint = FOLDER / "rannc" / f"step={STEPS // 2}.ckpt"
    ours, theirs = fit("rannc", checkpoint), fit("ddp", checkpoint)
    assert STEPS * ADDED // 4 < sum(what == "loss" for what, _ in ours[0].found) <= STEPS * ADDED // 2
    compare(ours, theirs)


{"parity": parity, "bf16": parity, "resume": resume}[WAY]()
print(f"{WAY} is right on rank {RANK}", flush=True)
