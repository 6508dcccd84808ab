"""LightningModules whose steps compute with several of their modules, with strategy="rannc" and with strategy="ddp".

usage: lightning_parts.py {parity|resume} FOLDER
"""

import itertools
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from yardstick import raises, same_runs

import pyrannc
from pyrannc.integrations.lightning import RaNNCMetrics, RaNNCStrategy
from rannd.errors import RanndError, UsageError

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
WIDTH, CODE, GLOBAL, STEPS, ADDED = 16, 4, 8, 20, 2
SHOWN = 1e-9


def network(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths[:-1])]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1])).double()


class Coder(pl.LightningModule):
    """One in another LightningModule, whose Trainer it has."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.net = network(*widths)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs


class Late(Coder):
    """Reads the Trainer's state."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (self.current_epoch + 1)


class Noting(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.found: list[tuple[str, Tensor]] = []

    def note(self, name: str, value: Tensor) -> None:
        self.log(name, value, sync_dist=True)
        self.found.append((name, value.detach().clone()))


class Autoencoder(Noting):
    """As in Lightning's introduction: forward has the encoder alone, steps have both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(WIDTH, 8, 8, CODE), network(CODE, 8, 8, WIDTH)
        self.teacher = network(WIDTH, 8, WIDTH).requires_grad_(False)
        self.same = self.encoder
        self.error = MeanSquaredError().set_dtype(torch.float64)
        self.register_buffer("scale", torch.ones((), dtype=torch.double))

    def forward(self, inputs: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(inputs)
        return encoded

    def _shared(self, batch: list[Tensor]) -> Tensor:
        given = batch[0]
        decoded: Tensor = self.decoder(self.same(given)) * self.scale
        return decoded

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        decoded = self._shared(batch)
        self.error(decoded, batch[1])
        loss = F.mse_loss(decoded, batch[1]) + F.mse_loss(decoded, self.teacher(batch[0]))
        self.note("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("valid", F.mse_loss(self._shared(batch), batch[1]))

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        self.found.append(("error", self.error.compute()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Adversaries(Noting):
    """A GAN with two optimizers, as in Lightning's examples; forward has the generator alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleDict({"make": network(CODE, 8, 8, WIDTH), "judge": network(WIDTH, 8, 8, 1)})

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.nets["make"](z)
        return made

    def score(self, given: Tensor, real: bool) -> Tensor:
        found = self.nets["judge"](given)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        making, judging = self.optimizers()  # type: ignore[misc]
        real, z = batch[0], batch[1][:, :CODE]
        self.toggle_optimizer(making)
        loss = self.score(self(z), True)
        self.note("making", loss)
        self.manual_backward(loss)
        self.clip_gradients(making, gradient_clip_val=0.05)
        making.step()
        making.zero_grad()
        self.untoggle_optimizer(making)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(judging)
            loss = (self.score(real, True) + self.score(self(z).detach(), False)) / 2
            self.note("judging", loss)
            self.manual_backward(loss)
            judging.step()
            judging.zero_grad()
            self.untoggle_optimizer(judging)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("tested", self.score(self(batch[1][:, :CODE]), True))

    def on_train_epoch_end(self) -> None:
        self.found.append(("made", self(torch.ones(2, CODE, dtype=torch.double)).detach()))

    def configure_optimizers(self) -> Any:
        betas = (0.5, 0.999)
        return [torch.optim.Adam(self.nets[name].parameters(), lr=1e-2, betas=betas) for name in ("make", "judge")], []


class Finetuned(Noting):
    """Has a backbone, which a callback freezes and trains later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = network(WIDTH, 8, 8), network(8, 8, WIDTH)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.note("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((each for each in self.parameters() if each.requires_grad), lr=0.1)


class Reading(Finetuned):
    """A module reads the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Late(8, 8, WIDTH)


class Shared(Finetuned):
    """Two modules have one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head[0][0].weight = self.backbone[0][0].weight  # type: ignore[union-attr, index]


class Several(Finetuned):
    """A module has two optimizers."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        own = [*self.backbone.parameters()]
        return [torch.optim.SGD(each, lr=0.1) for each in (own[:2], [*own[2:], *self.head.parameters()])]


class Bare(Finetuned):
    """Has a parameter outside of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.backbone(inputs) * self.gain
        return outputs


def loader(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(count, WIDTH, dtype=torch.double, generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(*tensors), batch_size=GLOBAL // SIZE)


def trainer(strategy: Any, folder: Path, *callbacks: Callback, **options: Any) -> pl.Trainer:
    ours = strategy == "rannc" or isinstance(strategy, RaNNCStrategy)
    return pl.Trainer(
        strategy=strategy if ours else "ddp_find_unused_parameters_true",
        accelerator="cpu",
        **({} if ours else {"devices": SIZE}),
        precision="64-true",
        callbacks=[*callbacks, *([RaNNCMetrics()] if ours else [])],
        logger=CSVLogger(folder, version=0) if ours else False,
        log_every_n_steps=5,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def saves(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)


def autoencoder(strategy: Any, checkpoint: Path | None = None) -> tuple[Noting, dict[str, Any]]:
    folder, model = FOLDER / (strategy if checkpoint is None else f"{strategy}, resumed"), Autoencoder()
    options: Any = {"max_epochs": 1, "accumulate_grad_batches": ADDED, "gradient_clip_val": 0.05}
    one = trainer(strategy, folder, saves(folder), val_check_interval=10, **options)
    one.fit(model, loader(STEPS * ADDED * GLOBAL, 1), loader(24, 2), ckpt_path=checkpoint)
    return model, finished(one, model, folder)


def adversaries(strategy: Any, checkpoint: Path | None = None) -> tuple[Noting, dict[str, Any]]:
    kind = f"{strategy} adversaries"
    folder, model = FOLDER / (kind if checkpoint is None else f"{kind}, resumed"), Adversaries()
    one = trainer(strategy, folder, saves(folder), max_epochs=1)
    one.fit(model, loader(STEPS * GLOBAL, 1), ckpt_path=checkpoint)
    return model, finished(one, model, folder)


def finished(one: pl.Trainer, model: Noting, folder: Path) -> dict[str, Any]:
    one.save_checkpoint(folder / "last.ckpt")
    one.test(model, loader(24, 3), verbose=False)
    width = CODE if isinstance(model, Adversaries) else WIDTH
    predicted: Any = one.predict(model, DataLoader(torch.ones(8, width, dtype=torch.double)))
    model.found.append(("predicted", torch.cat(predicted)))
    one.test(model, loader(24, 3), ckpt_path=min(folder.glob("step=*.ckpt")), verbose=False)
    one.strategy.barrier()
    found: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return found


def compare(ours: tuple[Noting, Any], theirs: tuple[Noting, Any]) -> None:
    same_runs((ours[0].found, ours[1]), (theirs[0].found, theirs[1]), SHOWN)


def parity() -> None:
    ours = autoencoder("rannc")
    compare(ours, autoencoder("ddp"))
    assert all(isinstance(each, pyrannc.RaNNCModule) for each in (ours[0].encoder, ours[0].decoder, ours[0].teacher))
    assert ours[0].same is ours[0].encoder
    if RANK == 0:
        told = (FOLDER / "rannc" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
        assert "decoder/rannd/predicted_step_ms" in told, told
    compare(adversaries("rannc"), adversaries("ddp"))
    finetuned()
    for kind, told in (
        (Reading, "self.current_epoch is not known where"),
        (Shared, "Shared.backbone and Shared.head share a parameter"),
        (Several, "2 optimizers of Several.backbone"),
        (Bare, "gain is not a parameter of Bare.backbone, Bare.head, which are partitioned"),
    ):
        model = kind()
        raises(RanndError, told, lambda model=model: trainer("rannc", FOLDER).fit(model, loader(10 * GLOBAL, 1)))


def finetuned() -> None:
    """Layers that are frozen at first are trained alike on all ranks later, beside a plain loop; modules may be named.

    DistributedDataParallel does not reduce gradients of what was frozen when it was made.
    """

    inputs, targets = loader(10 * GLOBAL, 1).dataset.tensors  # type: ignore[attr-defined]

    def fit(strategy: Any) -> Noting:
        model, callback = Finetuned(), BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)
        one = trainer(strategy, FOLDER / "finetuned", callback, max_epochs=2, use_distributed_sampler=False)
        own = TensorDataset(inputs[RANK::SIZE], targets[RANK::SIZE])
        one.fit(model, DataLoader(own, batch_size=GLOBAL // SIZE))
        return model

    raises(UsageError, "equal needs the values of", lambda: fit("rannc"))  # the callback compares all parameters
    os.environ["RANNC_PARTITION_NUM"] = "1"
    ours = torch.stack([value for _, value in fit(RaNNCStrategy(module=["backbone", "head"])).found])
    os.environ["RANNC_PARTITION_NUM"] = "2"
    plain, theirs = Finetuned(), []
    for trained in (plain.head, plain):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for x, y in zip(inputs.split(GLOBAL), targets.split(GLOBAL), strict=True):
            outputs = plain.head(plain.backbone(x))
            theirs.append(F.mse_loss(outputs[RANK::SIZE], y[RANK::SIZE]).detach())
            optimizer.zero_grad()
            F.mse_loss(outputs, y).backward()
            optimizer.step()
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=SHOWN, atol=SHOWN)


def resume() -> None:
    for one, name in ((autoencoder, "rannc"), (adversaries, "rannc adversaries")):
        checkpoint, last = sorted((FOLDER / name).glob("step=*.ckpt"))  # each optimizer counts its steps
        assert last.stat().st_mtime_ns > checkpoint.stat().st_mtime_ns
        compare(one("rannc", checkpoint), one("ddp", checkpoint))


{"parity": parity, "resume": resume}[WAY]()
print(f"{WAY} is right on rank {RANK}", flush=True)
