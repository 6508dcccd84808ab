"""`pyrannc.elastic` in one process: checkpoints, going on, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pyrannc
from rannd.errors import CheckpointError, UsageError
from rannd.ranks import memory_files
from rannd.runner.elastic.rescue_plan import plan_rescue
from rannd.runner.watch import kept_memory
from rannd.runner.watch.errand import HeldPart
from rannd.runtime.checkpoint import saving
from rannd.runtime.elastic import elastic_state
from rannd.runtime.elastic.checkpoint_folders import folder_of, saved_steps
from rannd.runtime.elastic.stragglers import Stragglers

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
BATCHES, EVERY = 5, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


class Training:
    """A script that trains over five batches an epoch."""

    def __init__(self, directory: Path, *, sampled: bool = True, every: int = EVERY) -> None:
        net = Net()
        self.optimizer = torch.optim.Adam(net.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.model: Any = pyrannc.RaNNCModule(net, self.optimizer)
        self.sampler = pyrannc.ElasticSampler(range(40), 8, seed=5)
        self.state = pyrannc.elastic(
            self.model,
            self.optimizer,
            self.scheduler,
            self.sampler if sampled else None,
            directory=directory,
            every=every,
        )
        self.seen: list[list[int]] = []

    def run(self, steps: int, epochs: int = 3) -> None:
        """Train up to so many steps."""
        for epoch in range(self.sampler.epoch, epochs):
            self.sampler.set_epoch(epoch)
            for rows in DataLoader(range(40), batch_sampler=self.sampler):  # type: ignore[arg-type]
                if self.state.step == steps:
                    return
                self.seen.append(rows.tolist())
                self.step(rows)

    def step(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(DATA[rows]).backward()
        self.optimizer.step()
        self.scheduler.step()
        if self.state._pending is not None:  # else the next one would come too early
            self.state._pending.join()

    def settle(self) -> None:
        """Wait for what goes on beside."""
        self.state._await_save()
        if self.state._pruning is not None:
            self.state._pruning.join()

    @property
    def weight(self) -> torch.Tensor:
        return self.model.module.layer.weight.detach().clone()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _closed(alone: None) -> Iterator[None]:
    yield
    if elastic_state._present is not None:
        elastic_state._present.close()


def _after(directory: Path, **options: Any) -> Training:
    """Another training, in the same process."""
    if elastic_state._present is not None:
        elastic_state._present.close()
    return Training(directory, **options)


@pytest.fixture
def whole(tmp_path: Path) -> tuple[torch.Tensor, list[list[int]]]:
    """Weight after ten steps, and the batches of them, of a training that is not stopped."""
    training = Training(tmp_path / "whole", every=1000)
    training.run(10)
    found = training.weight, training.seen
    training.state.close()
    return found


@pytest.mark.long
def test_a_training_that_is_broken_off_goes_on(tmp_path: Path, whole: tuple[torch.Tensor, list[list[int]]]) -> None:
    first = Training(tmp_path)
    assert not first.state.restored
    first.state.extra["best"] = 0.5
    first.run(7)
    first.settle()
    assert saved_steps(tmp_path) == [6, 4]
    second = _after(tmp_path)
    assert (second.state.step, second.state.restored, second.state.extra) == (6, True, {"best": 0.5})
    assert (second.sampler.epoch, second.sampler.position) == (1, 1)
    second.run(10)
    torch.testing.assert_close(second.weight, whole[0], rtol=0, atol=0)
    assert first.seen[:6] + second.seen == whole[1]


@pytest.mark.long
def test_without_a_sampler_it_saves_before_the_next_call(tmp_path: Path) -> None:
    first = Training(tmp_path, sampled=False)
    for _ in range(5):
        first.step(torch.arange(8))
    first.settle()
    assert saved_steps(tmp_path) == [4, 2]
    assert _after(tmp_path, sampled=False).state.step == 4


def test_a_damaged_checkpoint_is_left_out_and_kept_until_it_is_replaced(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(7)
    first.settle()
    (folder_of(tmp_path, 6) / "__0_0.distcp").write_bytes(b"")
    second = _after(tmp_path, every=1)
    assert second.state.step == 4
    second.run(5)
    second.settle()
    assert saved_steps(tmp_path) == [6, 5, 4], "two that are whole"
    second.run(7)
    second.settle()
    assert saved_steps(tmp_path) == [7, 6]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The files that a watcher shares with this rank."""
    monkeypatch.setenv("RANNC_SNAPSHOTS", "neighbour")
    files = memory_files.make()
    monkeypatch.setenv(memory_files.VARIABLE, f"{','.join(map(str, files))}:{os.getpid()}")
    yield files
    for each in files:
        os.close(each)


def _rescue(memory: list[int], after: int) -> Path:
    """Write what is kept, as a watcher does."""
    order = plan_rescue({0: [HeldPart(**each) for each in kept_memory.held(memory)]}, after)
    assert order is not None
    kept_memory.write(memory, order.number, 0, order.folder)
    return Path(order.folder)


@pytest.mark.parametrize("damaged", [False, True], ids=["", "beside a later checkpoint that is damaged"])
def test_a_step_in_memory_outlives_its_training(
    tmp_path: Path, whole: tuple[torch.Tensor, list[list[int]]], memory: list[int], damaged: bool
) -> None:
    first = Training(tmp_path)
    first.state.extra["best"] = 0.5
    first.run(7)
    first.settle()
    folder = _rescue(memory, after=6)
    later = memory_files.rescue_folder(str(tmp_path), 9, "0f")
    shutil.copytree(folder, later)
    (Path(later) / "part-0.json").unlink()
    if damaged:
        shutil.copytree(folder_of(tmp_path, 6), folder_of(tmp_path, 8))
        (folder_of(tmp_path, 8) / "__0_0.distcp").write_bytes(b"")
    second = _after(tmp_path)
    assert (second.state.step, second.state.extra) == (7, {"best": 0.5})
    second.run(10)
    torch.testing.assert_close(second.weight, whole[0], rtol=0, atol=0)
    assert first.seen[:7] + second.seen == whole[1]
    assert not folder.exists()
    assert Path(later).exists(), "it is of a later step, which nobody has loaded"


def test_what_another_training_has_kept_is_not_taken(tmp_path: Path, memory: list[int]) -> None:
    Training(tmp_path / "one").run(5)
    assert kept_memory.held(memory)
    _after(tmp_path / "two")
    assert kept_memory.held(memory) == []


def test_a_state_that_cannot_be_kept_is_told_and_the_training_goes_on(
    tmp_path: Path, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, every=100)
    training.run(2)
    training.state.extra["strange"] = object()
    training.run(4)
    training.state.extra.clear()
    training.run(6)
    assert "Steps are not kept in memory any more: extra" in caplog.text
    assert {each["step"] for each in kept_memory.held(memory)} == {2}, "the last one that is whole"


def test_damaged_checkpoints_alone_are_an_error(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(5)
    first.settle()
    first.state.close()
    for step in saved_steps(tmp_path):
        (folder_of(tmp_path, step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints in"):
        Training(tmp_path)


def test_a_half_written_folder_is_no_checkpoint(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.run(5)
    first.settle()
    shutil.copytree(folder_of(tmp_path, 4), folder_of(tmp_path, 8))
    (folder_of(tmp_path, 8) / "checkpoint.json").unlink()
    assert _after(tmp_path).state.step == 4


def test_a_save_that_fails_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = saving.write_shard

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    training = Training(tmp_path)
    monkeypatch.setattr(saving, "write_shard", full)
    training.run(4)
    training.state._await_save()
    assert "No space left on device" in caplog.text
    assert "The training goes on; the next try is in 2 steps" in caplog.text
    with pytest.raises(CheckpointError, match="No space left"):
        training.state.save()
    monkeypatch.setattr(saving, "write_shard", right)
    training.run(9)
    training.settle()
    assert saved_steps(tmp_path)[0] >= 6


def test_it_ends_after_the_step_when_it_is_asked_to(tmp_path: Path) -> None:
    training = Training(tmp_path, every=1000)
    training.run(3)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        training.run(10)
    assert ended.value.code == 128 + signal.SIGUSR1, "no elastic rannc-run waits for it"
    assert training.state.step == 4
    assert saved_steps(tmp_path) == [4]
    assert _after(tmp_path).sampler.position == 4


def test_a_handler_of_the_scripts_own_is_called_and_put_back(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    try:
        own = signal.getsignal(signal.SIGUSR1)
        training = Training(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
        training.state.close()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_saving_and_between_at_a_place_of_the_scripts_choice(tmp_path: Path) -> None:
    training = Training(tmp_path, every=1)
    for number, rows in enumerate(DataLoader(range(40), batch_sampler=training.sampler)):  # type: ignore[arg-type]
        training.step(rows)
        training.state.between()
        assert training.sampler.position == number + 1
    training.state.save()
    training.settle()
    assert saved_steps(tmp_path)[0] == 5
    assert _after(tmp_path).sampler.position == 5


def test_one_training_at_a_time(tmp_path: Path) -> None:
    Training(tmp_path / "one")
    with pytest.raises(UsageError, match=r"pyrannc\.elastic was called before"):
        Training(tmp_path / "other")


def test_what_is_no_argument_is_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(UsageError, match="wrap the model first"):
        pyrannc.elastic(net, optimizer, directory=tmp_path)
    model = pyrannc.RaNNCModule(net, optimizer)
    sampler: Any = torch.utils.data.SequentialSampler(range(4))
    with pytest.raises(UsageError, match=r"sampler is a SequentialSampler; use pyrannc\.ElasticSampler"):
        pyrannc.elastic(model, optimizer, sampler=sampler, directory=tmp_path)
    with pytest.raises(UsageError, match="every = -1"):
        pyrannc.elastic(model, optimizer, directory=tmp_path, every=-1)


def test_another_scripts_checkpoint_is_refused(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    model = pyrannc.RaNNCModule(net, optimizer)
    pyrannc.save_checkpoint(folder_of(tmp_path, 3), model, optimizer, step=3)
    with pytest.raises(CheckpointError, match=r"was not saved by pyrannc\.elastic"):
        pyrannc.elastic(model, optimizer, directory=tmp_path)


def test_a_checkpoint_that_the_listing_does_not_show_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does for half a minute."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    pyrannc.save_checkpoint(folder_of(tmp_path, 3), pyrannc.RaNNCModule(net, optimizer), optimizer, step=3)
    assert saved_steps(tmp_path, 3) == [3]
    assert saved_steps(tmp_path, 4) == [3], "it is not there, or of another directory"
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    assert saved_steps(tmp_path) == []
    assert saved_steps(tmp_path, 3) == [3]


def test_the_step_to_resume_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pyrannc.resume_step() is None
    monkeypatch.setenv("RANND_RESUME_STEP", "120")
    assert pyrannc.resume_step() == 120


@pytest.mark.parametrize(
    ("net", "balance", "moves"),
    [
        (lambda: nn.Linear(4, 1), True, True),
        (lambda: nn.Linear(4, 1), False, False),
        # Statistics of a rank's samples depend on which these are.
        (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), True, False),
    ],
)
def test_rows_move_where_the_script_wants_that_and_samples_are_independent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: Any, balance: bool, moves: bool
) -> None:
    asked = []

    class Watched(Stragglers):
        def __init__(self, world: Any, factor: float, bounds: Any, balanced: Any) -> None:
            super().__init__(world, factor, bounds, balanced)
            asked.append(bounds)

    monkeypatch.setattr(elastic_state, "Stragglers", Watched)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = pyrannc.RaNNCModule(model, optimizer)
    sampler = pyrannc.ElasticSampler(range(24), 12, balance=balance)
    state = pyrannc.elastic(model, optimizer, sampler=sampler, directory=tmp_path)
    assert asked[0]() is None, "there is no plan yet"
    model(torch.randn(12, 4)).square().mean().backward()
    bounds = asked[0]()
    assert (bounds is not None) == moves
    if bounds is not None:
        assert bounds[0] >= 1
        assert bounds[1] > 200, "a small model leaves memory for more than twice as many rows"
    state.close()
