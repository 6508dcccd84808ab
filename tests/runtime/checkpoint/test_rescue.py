"""Checkpoints of parts that were kept in memory: as a save would have written them, or refused."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import CheckpointError
from rannd.ranks import memory_files
from rannd.runner.watch import kept_memory
from rannd.runtime.checkpoint import rescue
from rannd.runtime.checkpoint.checkpoint_api import subject_of
from rannd.runtime.elastic.memory_part import bytes_of, part_of, write_part


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        net.register_buffer("column", torch.randn(5, 3)[:, 1])  # a view
        self.optimizer = torch.optim.Adam(net.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.model: Any = pyrannc.RaNNCModule(net, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *(each for held in state.values() for each in held.values())]


@pytest.fixture
def training() -> Training:
    made = Training(0)
    made.step()
    made.step()
    return made


def written(training: Training, directory: Path, step: int = 2) -> Path:
    """The folder that a watcher writes of what a rank keeps."""
    files = memory_files.make()
    try:
        world, subject = subject_of(training.model, training.optimizer, training.scheduler, None, None)
        content, outline = part_of(world, subject, step, {"mine": [1, "two"]})
        assert bytes_of(content) > 0
        write_part(files[0], world, content, outline, number=3, step=step, folder=str(directory))
        (held,) = kept_memory.held(files)
        assert held == {"number": 3, "step": step, "rank": 0, "size": 1, "folder": str(directory)}
        folder = memory_files.rescue_folder(str(directory), step, "12ab")
        kept_memory.write(files, 3, 0, folder)
    finally:
        for each in files:
            os.close(each)
    return Path(folder)


def test_it_loads_as_any_other(training: Training, tmp_path: Path) -> None:
    folder = written(training, tmp_path)
    assert rescue.rescued(tmp_path) == [(2, folder)]
    rescue.make_checkpoint(folder, tmp_path / "c")
    other = Training(1)
    other.step()
    found = pyrannc.load_checkpoint(tmp_path / "c", other.model, other.optimizer, scheduler=other.scheduler)
    assert (found.step, found.extra) == (2, {"mine": [1, "two"]})
    for one, two in zip(training.state(), other.state(), strict=True):
        assert torch.equal(one, two)
    assert other.scheduler.get_last_lr() == training.scheduler.get_last_lr()
    pyrannc.save_checkpoint(tmp_path / "d", training.model, training.optimizer, scheduler=training.scheduler, step=2)
    names = [sorted(each.name for each in (tmp_path / place).iterdir()) for place in "cd"]
    assert names[0] == names[1]
    rescue.forget(tmp_path, 1)
    assert len(rescue.rescued(tmp_path)) == 1, "it is of a later step"
    rescue.forget(tmp_path, 2)
    assert rescue.rescued(tmp_path) == []


def test_a_part_that_is_larger_than_the_one_before_it(training: Training, tmp_path: Path) -> None:
    """A file in memory is written again and again; what is behind a shorter part is gone."""
    files = memory_files.make()
    world, subject = subject_of(training.model, training.optimizer, None, None, None)
    try:
        for number, extra in enumerate(({"long": "x" * 100000}, {}, {"long": "x" * 5000})):
            content, outline = part_of(world, subject, 2, extra)
            write_part(files[0], world, content, outline, number=number, step=2, folder=str(tmp_path))
            ((_, record),) = memory_files.records(files[0])
            assert record.number == number
            assert os.fstat(files[0]).st_size == record.bytes
    finally:
        for each in files:
            os.close(each)


def facts(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        said = json.loads((folder / "part-0.json").read_text())
        change(said)
        (folder / "part-0.json").write_text(json.dumps(said))

    return apply


def part(**changes: Any) -> Callable[[Path], None]:
    """Change what a rank says, with the checksum that belongs to it."""

    def apply(folder: Path) -> None:
        path = folder / "part-0.msgpack"
        path.write_bytes(msgspec.msgpack.encode({**msgspec.msgpack.decode(path.read_bytes()), **changes}))
        data = path.read_bytes()
        facts(lambda said: said.update({path.name: {"bytes": len(data), "crc32": zlib.crc32(data)}}))(folder)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "part-0.json").unlink(), "part of rank 0 is missing"),
        (lambda folder: (folder / "part-0.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "part-0.msgpack").unlink(), "cannot be read"),
        (lambda folder: (folder / "part-0.msgpack").write_bytes(b"x" * 50), "damaged"),
        (facts(lambda said: said.pop("part-0.msgpack")), "damaged"),
        (facts(lambda said: said.update({"../else": {"bytes": 1, "crc32": 1}})), "names the file '../else'"),
        (facts(lambda said: said.update({"else": {"bytes": 1, "crc32": 1}})), "No such file"),
        (part(size=2), "part of rank 1 is missing"),
        (part(size=0), "there are 0 ranks"),
        (part(size=1 << 40), "ranks"),
        (part(outline=b"no archive"), "damaged"),
        (part(written={}), "damaged"),
    ],
)
def test_what_is_not_whole_is_refused(
    training: Training, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = written(training, tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        rescue.make_checkpoint(folder, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert [each for each in tmp_path.iterdir() if "draft" in each.name] == []


def test_damaged_tensors_are_found_when_they_are_loaded(training: Training, tmp_path: Path) -> None:
    folder = written(training, tmp_path)
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    rescue.make_checkpoint(folder, tmp_path / "c")
    with pytest.raises(CheckpointError, match="damaged"):
        pyrannc.load_checkpoint(tmp_path / "c", training.model, training.optimizer)


def test_a_folder_that_the_listing_does_not_show_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does for half a minute."""
    told = memory_files.rescue_folder(str(tmp_path), 12, "0a")
    os.mkdir(told)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    assert rescue.rescued(tmp_path) == []
    assert rescue.rescued(tmp_path, told) == [(12, Path(told))]
    assert rescue.rescued(tmp_path / "other", told) == []
    assert rescue.rescued(tmp_path, memory_files.rescue_folder(str(tmp_path), 13, "0a")) == [], "removed since"


def test_a_folder_that_is_known_of_is_listed_once(tmp_path: Path) -> None:
    told = memory_files.rescue_folder(str(tmp_path), 12, "0a")
    os.mkdir(told)
    assert rescue.rescued(tmp_path, told) == [(12, Path(told))]
    assert rescue.rescued(tmp_path, str(tmp_path / "step-00000013")) == [(12, Path(told))]
