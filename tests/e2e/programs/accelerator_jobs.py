"""A training loop of Hugging Face's Accelerate with a partitioned model, compared with DistributedDataParallel's.

usage: accelerator_jobs.py {parity|bf16|resume|pair|separate} FOLDER

parity  20 steps in doubles: accumulation, clipping, a schedule of the learning rate, evaluation, states and the model
bf16    the same in mixed precision
resume  goes on from the state after 10 steps that `parity` has left, on any number of ranks
separate  model and optimizer prepared in calls of their own, hooks of states, and an optimizer of no model
pair    two models, each with an optimizer, of which one computes the other's input
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from yardstick import raises, same_notes

import pyrannc
from pyrannc.integrations.accelerate import RaNNCAccelerator
from rannd.errors import UsageError

RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
WIDTH, GLOBAL, STEPS, ADDED = 16, 8, 20, 2
DTYPE = torch.float32 if WAY == "bf16" else torch.float64
SHOWN = {"bf16": 3e-2}.get(WAY, 1e-9)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(DTYPE)


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(count, WIDTH, dtype=DTYPE, generator=generator) for _ in range(2)))


class Job:
    """A script as its author has it; the class of the accelerator is what differs."""

    def __init__(self, kind: type[Accelerator]) -> None:
        precision = "bf16" if WAY == "bf16" else "no"
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=ADDED, mixed_precision=precision)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # Not prepared: a prepared one makes a step for each rank, and could not go on with another number of them.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.accelerator.register_for_checkpointing(self.scheduler)
        loader = DataLoader(rows(STEPS * ADDED * GLOBAL, 1), batch_size=GLOBAL // SIZE)
        tested = DataLoader(rows(21, 2), batch_size=GLOBAL // SIZE)
        self.model, self.optimizer, self.loader, self.tested = self.accelerator.prepare(
            model, optimizer, loader, tested
        )
        self.found: list[tuple[str, Tensor]] = []

    def note(self, what: str, value: Any) -> None:
        self.found.append((what, torch.as_tensor(value).detach().double().cpu().clone()))

    def train(self, begin: int = 0, save: Path | None = None) -> None:
        """All steps from `begin` on; halfway the state is saved."""
        accelerator, step = self.accelerator, begin
        for inputs, labels in accelerator.skip_first_batches(self.loader, begin * ADDED):
            with accelerator.accumulate(self.model):
                outputs = self.model(inputs)
                loss = F.mse_loss(outputs, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.note("norm", accelerator.clip_grad_norm_(self.model.parameters(), 0.05))
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.note("loss", accelerator.reduce(loss.detach(), "mean"))
            if accelerator.sync_gradients:
                self.scheduler.step()
                step += 1
                self.note("rate", self.optimizer.param_groups[0]["lr"])
                if step % 5 == 0:
                    self.note("evaluation", self.evaluate())
                if step == STEPS // 2 and save is not None:
                    accelerator.save_state(str(save))
        assert step == STEPS

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        self.model.eval()
        errors = [
            self.accelerator.gather_for_metrics((self.model(inputs) - labels).pow(2)) for inputs, labels in self.tested
        ]
        self.model.train()
        whole = torch.cat(errors)
        assert len(whole) == 21
        return whole.mean()

    def state(self) -> dict[str, Tensor]:
        """The whole model, on rank 0."""
        return dict(self.accelerator.get_state_dict(self.model))


def compare(one: Job, other: Job, skip: int = 0) -> None:
    same_notes(one.found, other.found[skip:], SHOWN)
    ours, theirs = one.state(), other.state()
    if RANK == 0:
        torch.testing.assert_close(ours, theirs, rtol=SHOWN, atol=SHOWN)


def parity() -> None:
    plain, job = Job(Accelerator), Job(RaNNCAccelerator)
    plain.train()
    job.train(save=FOLDER / "state")
    assert isinstance(job.model, pyrannc.RaNNCModule)
    assert job.accelerator.unwrap_model(job.model) is job.model
    compare(job, plain)
    job.accelerator.save_model(job.model, FOLDER / "model")
    whole = job.state()
    if RANK == 0:
        saved = safetensors.torch.load_file(FOLDER / "model" / "model.safetensors")
        torch.testing.assert_close(saved, whole, rtol=0, atol=0)
    raises(UsageError, "accelerator.prepare(model, optimizer)", lambda: job.accelerator.prepare_model(network()))


def resume() -> None:
    plain, job = Job(Accelerator), Job(RaNNCAccelerator)
    plain.train()
    assert job.accelerator.load_state(str(FOLDER / "state")) is None
    job.train(begin=STEPS // 2)
    compare(job, plain, skip=len(plain.found) // 2)


def separate() -> None:
    accelerator, seen = RaNNCAccelerator(cpu=True), list[Any]()
    model = accelerator.prepare(network())
    model.register_forward_hook(lambda *_: seen.append("called"))
    steps = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scale = nn.Parameter(torch.ones((), dtype=DTYPE))
    others = accelerator.prepare(torch.optim.AdamW([scale], lr=1e-2))

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        seen.append([type(each) for each in models])
        if RANK == 0:
            torch.save(weights[0], Path(folder) / "own.pt")
        weights.pop()

    def load(models: list[nn.Module], folder: str) -> None:
        seen.append([type(models.pop())])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

    def train() -> list[Tensor]:
        losses = []
        for step in range(3):
            inputs = torch.randn(4, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(10 * step + RANK))
            loss = (model(inputs) * scale).pow(2).mean()
            accelerator.backward(loss)
            scale.grad = accelerator.reduce(scale.grad, "mean")  # Accelerate saves rank 0's optimizer
            for each in (steps, others):
                each.step()
                each.zero_grad()
            losses.append(loss.detach())
        return losses

    train()
    accelerator.save_state(str(FOLDER / "separate"))
    whole, kept, first = accelerator.get_state_dict(model), scale.detach().clone(), train()
    accelerator.load_state(str(FOLDER / "separate"))
    with torch.no_grad():
        scale.copy_(kept)
    torch.testing.assert_close(train(), first, rtol=0, atol=0)
    assert seen.count("called") == 9
    assert [each for each in seen if each != "called"] == [[type(model)], [type(model)]]
    if RANK == 0:
        torch.testing.assert_close(torch.load(FOLDER / "separate" / "own.pt"), dict(whole), rtol=0, atol=0)
    averaged = accelerator.prepare(network())
    _ = pyrannc.AveragedModel(averaged)
    late = torch.optim.SGD(averaged.parameters(), lr=0.1)
    raises(UsageError, "that an AveragedModel averages already", lambda: accelerator.prepare(late))
    for each, told in ((model, "has AdamW already"), (accelerator.prepare(network()), "has been called")):
        each(torch.ones(2, WIDTH, dtype=DTYPE))
        raises(UsageError, told, lambda each=each: accelerator.prepare(torch.optim.SGD(each.parameters(), lr=0.1)))


def pair() -> None:
    """As a generator and a critic."""
    results = []
    for kind in (Accelerator, RaNNCAccelerator):
        accelerator = kind(cpu=True)
        models = [network(seed) for seed in (1, 2)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        second, first, first_steps, second_steps = accelerator.prepare(models[1], models[0], *optimizers)
        for step in range(4):
            inputs = torch.randn(4, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(10 * step + RANK))
            accelerator.backward(second(first(inputs)).pow(2).mean())
            for optimizer in (first_steps, second_steps):
                optimizer.step()
                optimizer.zero_grad()
        if kind is RaNNCAccelerator:
            accelerator.save_state(str(FOLDER / "pair"))
            assert (FOLDER / "pair" / "rannc_1").is_dir()
        results.append([accelerator.get_state_dict(each) for each in (first, second)])
    if RANK == 0:
        torch.testing.assert_close(results[1], results[0], rtol=SHOWN, atol=SHOWN)


{"parity": parity, "bf16": parity, "resume": resume, "pair": pair, "separate": separate}[WAY]()
print(f"{WAY} is right on rank {RANK}", flush=True)
