"""Trains, saves, goes on; or goes on from what was saved. Usage: checkpoints.py {train|resume|again|kill} FOLDER"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import pyrannc
from rannd.errors import CheckpointError, StepError, UsageError
from rannd.runtime.checkpoint import saving
from rannd.runtime.storage import dcp_files

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, RANKS = pyrannc.get_rank(), pyrannc.get_world_size()
ROWS, LENGTH, WIDTH = 12, 4, 256


class Net(nn.Module):
    """Tied weights, frozen ones, buffers, extra state; dropout only where plan and ranks do not change."""

    def __init__(self, fixed_ranks: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.3 if fixed_ranks else 0.0)
        self.more = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.two = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.one.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.note = ""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.drop(self.norm(torch.relu(self.one(self.embed(x)))))
        return nn.functional.cross_entropy(self.head(torch.tanh(self.two(self.more(hidden))).mean(1)), y)


class Run:
    """A model in training."""

    def __init__(self, fixed_ranks: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.fixed = fixed_ranks
        self.inner = Net(fixed_ranks)
        matrices = [p for p in self.inner.parameters() if p.ndim > 1]
        vectors = [p for p in self.inner.parameters() if p.ndim < 2]
        kind = torch.optim.SGD if fixed_ranks else torch.optim.Adam
        options = {"momentum": 0.9} if fixed_ranks else {"eps": 1e-4}
        self.optimizer = kind([{"params": matrices}, {"params": vectors, "lr": 0.02}], lr=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.model = pyrannc.RaNNCModule(self.inner, self.optimizer)
        self.steps = 0

    def step(self) -> float:
        if self.fixed:  # from the generators of the script, which a checkpoint has, too
            x, y = torch.randint(0, 11, (4, LENGTH)), torch.tensor(np.random.randint(0, 11, 4))
            y[0] = random.randrange(11)
        else:  # the same global mini-batch for any number of ranks
            numbers = torch.Generator().manual_seed(self.steps)
            rows = ROWS // RANKS
            batch = torch.randint(0, 11, (ROWS, LENGTH + 1), generator=numbers)[RANK * rows : (RANK + 1) * rows]
            x, y = batch[:, :LENGTH], batch[:, LENGTH]
        self.optimizer.zero_grad()
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1
        return loss.item()

    def state(self) -> tuple[dict, dict]:
        return self.model.state_dict(), self.optimizer.state_dict(from_global=True)


def seed_script() -> None:
    torch.manual_seed(100 + RANK)
    np.random.seed(200 + RANK)
    random.seed(300 + RANK)


def same(one: object, other: object, tolerance: float = 0.0) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.allclose(one, other, rtol=0, atol=tolerance) if tolerance else torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return one == other


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    said = ""
    try:
        call()
    except kind as exc:
        said = str(exc)
    assert text in said, f"{text!r} was expected: {said!r}"


def train() -> None:
    runs = {"fixed": Run(True, 1), "free": Run(False, 1)}
    seed_script()
    for name, run in runs.items():
        for _ in range(2):
            run.step()
        run.inner.note = "kept"
        before = pyrannc.save_checkpoint(
            FOLDER / name,
            run.model,
            run.optimizer,
            scheduler=run.scheduler,
            step=run.steps,
            extra={"list": [1, (2.5, b"x")]},
            asynchronous=True,
        )
        losses = [run.step() for _ in range(3)]
        before.wait()
        states = run.state()
        if RANK == 0:
            torch.save((losses, *states), FOLDER / f"{name}.pt")
    check_states(runs["free"])
    check_errors(runs["free"])


def check_states(run: Run) -> None:
    """The states of model and optimizer are a single process's, and load back."""
    parameters = {id(p) for p in run.model.parameters(own=True)}
    everything = len(list(run.inner.parameters()))
    assert 2 < len(parameters) < everything, f"the plan gives this rank {len(parameters)} of {everything}"
    model, optimizer = run.state()
    if RANK:
        raises(UsageError, "another rank has", lambda: pickle.dumps(model))
        raises(UsageError, "another rank has", lambda: pickle.dumps(optimizer))
    # a state of rank 0 alone does not load
    raises(UsageError, "another rank has", lambda: run.model.load_state_dict(model))
    raises(UsageError, "another rank has", lambda: run.optimizer.load_state_dict(optimizer, True))
    stranger = torch.optim.SGD(run.inner.parameters(), lr=0.0)  # beside the one that the wrapper was given
    stranger.step()
    raises(UsageError, "SGD was not given to the RaNNCModule", stranger.state_dict)
    everywhere = run.model.state_dict(rank0_only=False)
    if RANK == 0:
        plain = Net(False)
        plain.load_state_dict(model)
        matrices = [p for p in plain.parameters() if p.ndim > 1]
        vectors = [p for p in plain.parameters() if p.ndim < 2]
        single = torch.optim.Adam([{"params": matrices}, {"params": vectors}])
        single.load_state_dict(optimizer)
        assert same(single.state_dict()["param_groups"], optimizer["param_groups"])
        assert len(single.state) == len(matrices) + len(vectors) - 1  # one is frozen
        assert same(dict(model), dict(everywhere)), "ranks get other states"
        assert list(model) == list(plain.state_dict())
        assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr()
        assert not any(torch.isnan(v).any() for v in model.values() if isinstance(v, torch.Tensor))
    bare = run.optimizer.state_dict()
    if RANK == 0:
        assert same(bare, optimizer)
    torch.save(bare, FOLDER / "optimizer.pt")  # on all ranks, as a script for one process does: rank 0 writes
    pyrannc.barrier()
    optimizer = torch.load(FOLDER / "optimizer.pt", weights_only=True)
    other = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in everywhere.items()}
    for state in optimizer["state"].values():
        state["exp_avg"] += 1
    run.model.load_state_dict(other)
    run.optimizer.load_state_dict(optimizer)
    again = run.state()
    if RANK == 0:
        assert same(dict(again[0]), other)
        assert same(again[1], optimizer)
    own = run.optimizer.state_dict(from_global=False)
    assert sum(len(group["params"]) for group in own["param_groups"]) == len(parameters)
    run.optimizer.load_state_dict(own)
    # torch's own functions, with each rank's part
    sharded = run.model.state_dict(sharded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(sharded, checkpoint_id=FOLDER / "torch")
        for tensor in sharded.values():
            tensor.zero_()
        dcp.load(sharded, checkpoint_id=FOLDER / "torch")
    assert same({k: v for k, v in run.model.state_dict(rank0_only=False).items() if k in other}, other)


def check_errors(run: Run) -> None:
    """What is wrong on one rank is told on all, and changes nothing."""
    before = run.model.state_dict(rank0_only=False)
    last = RANK == RANKS - 1
    wrong = {**before, "two.weight": torch.zeros(3, 3)} if last else {**before, "two.bias": before["two.bias"] + 1}
    raises(UsageError, "size mismatch for two.weight", lambda: run.model.load_state_dict(wrong))
    raises(
        UsageError, "every rank has to give the whole state", lambda: run.model.load_state_dict({} if last else wrong)
    )
    raises(UsageError, "give every rank the whole state", lambda: run.optimizer.load_state_dict({}, from_global=True))
    raises(UsageError, "extra['a'] is a builtins.object", lambda: save(run, extra={"a": object() if last else 1}))
    raises(
        StepError,
        "equally often",
        lambda: run.optimizer.state_dict(from_global=True) if last else run.model.state_dict(),
    )
    save(run, step=1)
    if last:  # a disk that fills up, for one rank
        real, saving.write_shard = saving.write_shard, full
    raises(CheckpointError, "No space left on device", lambda: save(run, step=2))
    if last:
        saving.write_shard = real
    assert pyrannc.load_checkpoint(FOLDER / "errors", run.model).step == 1
    assert same(dict(run.model.state_dict(rank0_only=False)), dict(before))
    if RANK == 0:
        assert not list(FOLDER.glob(".*")), list(FOLDER.glob(".*"))
        victim = sorted((FOLDER / "errors").glob("*.distcp"))[-1]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    raises(CheckpointError, "is damaged", lambda: pyrannc.load_checkpoint(FOLDER / "errors", run.model))
    assert same(dict(run.model.state_dict(rank0_only=False)), dict(before))


def save(run: Run, **options: object) -> None:
    pyrannc.save_checkpoint(FOLDER / "errors", run.model, run.optimizer, **options)


def full(*args: object) -> None:
    dcp_files.write_shard(*args)  # type: ignore[arg-type]
    raise OSError(28, "No space left on device")


def resume(*, deployed: bool) -> None:
    """Under the plan of before, to the bit; under any other, to rounding."""
    seed_script()
    for name in ("free",) if RANKS != 2 else ("fixed", "free"):
        run = Run(name == "fixed", 5)
        if deployed:
            run.step()
        found = pyrannc.load_checkpoint(FOLDER / name, run.model, run.optimizer, scheduler=run.scheduler)
        assert found.step == 2
        assert found.extra == {"list": [1, (2.5, b"x")]}
        assert run.inner.note == "kept"
        run.steps = found.step
        losses = [run.step() for _ in range(3)]
        states = run.state()
        if RANK == 0:
            wanted, model, optimizer = torch.load(FOLDER / f"{name}.pt", weights_only=True)
            exact = os.environ.get("SAME_PLAN") == "yes"
            assert same(losses, wanted) if exact else np.allclose(losses, wanted, rtol=1e-9, atol=0)
            assert same(dict(states[0]), dict(model), 0 if exact else 1e-9), name
            assert same(states[1], optimizer, 0 if exact else 1e-9), name
            print("went on", name, len(run.model.deployment.stages))


def kill() -> None:
    """Killed in the second save: `resume` finds the first."""
    run = Run(False, 1)
    for _ in range(2):
        run.step()
    place = FOLDER / "killed"
    pyrannc.save_checkpoint(place, run.model, run.optimizer, step=run.steps)
    run.step()
    real, at = dcp_files.write_shard, sys.argv[3]

    def dying(*args: object) -> object:
        if at == "all" or (at == "last" and RANK == RANKS - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)  # type: ignore[arg-type]

    saving.write_shard = dying
    pyrannc.save_checkpoint(place, run.model, run.optimizer, step=run.steps)


def after_kill() -> None:
    """The last whole checkpoint is there, and the next save removes what the killed one left."""
    run = Run(False, 5)
    place = FOLDER / "killed"
    if RANK == 0:
        assert len(list(FOLDER.glob(".killed.*"))) >= 1
    assert pyrannc.load_checkpoint(place, run.model, run.optimizer).step == 2
    pyrannc.save_checkpoint(place, run.model, run.optimizer, step=7)
    assert pyrannc.load_checkpoint(place, run.model, run.optimizer).step == 7
    if RANK == 0:
        assert not list(FOLDER.glob(".*")), list(FOLDER.glob(".*"))


torch.set_default_dtype(torch.float64)
match MODE:
    case "train":
        train()
    case "resume":
        resume(deployed=False)
    case "again":
        resume(deployed=True)
    case "kill":
        kill()
    case "after_kill":
        after_kill()
print("finished on rank", RANK)
