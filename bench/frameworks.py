"""Steps of frameworks that own the training loop, compared with a plain loop: GPT-2 on two ranks, one thread each.

    python bench/frameworks.py [trainer accelerate lightning] [--rounds 6] [--steps 12]

Each round trains `steps` steps with each side, with a model of its own from the same plan, in turns; the order is
reversed every other round, and the first round is dropped. A step is the time from one optimizer step to the next; the
median of a round's steps counts, without the first two, which deploy the model. All sides read the same rows with the
same loader, clip gradients and step a schedule of the learning rate. A ratio above 1.0 means that the framework's step
is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _in_turns import GptSizes, gpt2
from _results import Spread, Table, found

SIDES = ("trainer", "accelerate", "lightning")
SIZES = GptSizes()
PLAN = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2", "RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1"}
CLIP, RATE = 1.0, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*SIDES, []], help="frameworks (default: all)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        compare(options.what, options.rounds, options.steps)
        return
    runner = Path(sysconfig.get_path("scripts")) / "rannc-run"
    command = [str(runner), "-np", "2", "--show-ranks", "0", __file__, *(options.what or SIDES)]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    raise SystemExit(subprocess.run(command, env={**os.environ, **PLAN}, check=False).returncode)


def compare(what: list[str], rounds: int, steps: int) -> None:
    """On each rank."""
    import pyrannc

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    made: dict[str, Callable[[int], list[float]]] = {"plain": plain, **{side: globals()[side] for side in what}}
    medians: dict[str, list[float]] = {side: [] for side in made}
    for number in range(rounds + 1):
        for side in reversed(made) if number % 2 else made:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                ends = made[side](steps)
            pyrannc.clear()
            times = [after - before for before, after in itertools.pairwise(ends[2:])]
            if number:
                medians[side].append(statistics.median(times))
    table = Table(
        f"GPT-2 in frameworks, two ranks, two stages, {rounds} rounds", "side", ("step", "{:.1f} ms"),
        "step / that of a plain loop",
    )  # fmt: skip
    table.row("plain loop", Spread.of(medians["plain"], 1e3), None)
    for side in what:
        ratio = Spread.of([one / other for one, other in zip(medians[side], medians["plain"], strict=True)])
        table.row(side, Spread.of(medians[side], 1e3), ratio)
        found("frameworks", ratio.median, side)


def rows(steps: int) -> list[dict[str, Any]]:
    """Of all ranks, for so many steps."""
    import torch

    count = 2 * SIZES.rows * steps
    tokens = torch.randint(SIZES.words, (count, SIZES.length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def own_loader(steps: int) -> Any:
    """The rows of a rank."""
    from torch.utils.data import DataLoader, DistributedSampler

    import pyrannc

    given = rows(steps)
    sampler: Any = DistributedSampler(given, pyrannc.get_world_size(), pyrannc.get_rank(), shuffle=False)  # type: ignore[arg-type]
    return DataLoader(given, batch_size=SIZES.rows, sampler=sampler)  # type: ignore[arg-type]


def schedule(optimizer: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def plain(steps: int) -> list[float]:
    """The ends of steps."""
    import torch

    import pyrannc

    model, ends = gpt2(SIZES), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rates, wrapped = schedule(optimizer), pyrannc.RaNNCModule(model, optimizer)
    for batch in own_loader(steps):
        wrapped(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends


def trainer(steps: int) -> list[float]:
    import transformers

    from pyrannc.integrations.transformers import RaNNCTrainer

    ends: list[float] = []

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=SIZES.rows, learning_rate=RATE,
            max_grad_norm=CLIP, save_strategy="no", logging_steps=steps, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        RaNNCTrainer(model=gpt2(SIZES), args=given, train_dataset=rows(steps), callbacks=[Ends()]).train()
    return ends


def accelerate(steps: int) -> list[float]:
    import torch
    from torch.utils.data import DataLoader

    from pyrannc.integrations.accelerate import RaNNCAccelerator

    accelerator, model, ends = RaNNCAccelerator(cpu=True), gpt2(SIZES), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader: Any = DataLoader(rows(steps), batch_size=SIZES.rows)  # type: ignore[arg-type]
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, schedule(optimizer))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends


def lightning(steps: int) -> list[float]:
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    import pyrannc.integrations.lightning

    ends: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt2(SIZES)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    one = pl.Trainer(
        strategy=pyrannc.integrations.lightning.RaNNCStrategy(), accelerator="cpu", max_steps=steps, logger=False,
        gradient_clip_val=CLIP, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    one.fit(Module(), DataLoader(rows(steps), batch_size=SIZES.rows))  # type: ignore[arg-type]
    return ends


if __name__ == "__main__":
    sys.exit(main())
