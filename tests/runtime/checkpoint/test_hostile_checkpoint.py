"""Checkpoints that somebody has changed and sealed again: an error of ours, before anything has changed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import CheckpointError
from rannd.runtime.checkpoint.manifest import MANIFEST, Manifest
from rannd.runtime.checkpoint.rng_state import check_random_state, random_state
from rannd.runtime.storage.checkpoint_file import facts

CPU = torch.device("cpu")


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()

    def state(self) -> list[Any]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        values = [each.detach().clone() for each in (*self.model.parameters(), *moments)]
        return [*values, torch.get_rng_state(), random.getstate(), str(np.random.get_state())]

    def load(self, path: Path, **options: Any) -> Any:
        return pyrannc.load_checkpoint(path, self.model, self.optimizer, **options)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    run = Training(0)
    run.step()
    pyrannc.save_checkpoint(tmp_path / "c", run.model, run.optimizer, step=1, extra={"a": 1})
    return tmp_path / "c"


def seal(place: Path) -> None:
    """Write the manifest that belongs to what is there now."""
    before = Manifest.read(place)
    assert before is not None
    now = {name: facts(place / name) for name in before.files}
    (place / MANIFEST).write_bytes(msgspec.structs.replace(before, files=now, digest="").sealed())


def refused(place: Path, message: str, **options: Any) -> None:
    run = Training(1)
    run.step()
    before = run.state()
    with pytest.raises(CheckpointError, match=message) as caught:
        run.load(place, **options)
    assert "half way" not in str(caught.value)
    for one, other in zip(before, run.state(), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def script(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of what the script's file says."""

    def make(place: Path) -> None:
        said = torch.load(place / "script.pt", weights_only=True)
        change(said)
        torch.save(said, place / "script.pt")

    return make


def index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change of the index."""

    def make(place: Path) -> None:
        said = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301 (made here)
        change(said)
        (place / ".metadata").write_bytes(pickle.dumps(said))

    return make


def _put_elsewhere(said: Any) -> None:
    for each in said.storage_data.values():
        each.relative_path = "other"


def _rename(said: Any, name: str) -> None:
    for key in [key for key in said.storage_data if key.fqn == "model.bias"]:
        said.storage_data[type(key)(name, key.offset)] = said.storage_data.pop(key)
    said.state_dict_metadata[name] = said.state_dict_metadata.pop("model.bias")


def _tensor(said: Any, name: str) -> Any:
    return said.state_dict_metadata[name].chunks


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no rng": (script(lambda said: said.pop("rng")), "script.pt cannot be read: it is damaged: .*rng"),
    "an rng that is none": (script(lambda said: said.update(rng=[5])), "damaged: .*rng"),
    "an empty rng": (script(lambda said: said.update(rng=[{}])), "random numbers are damaged: KeyError"),
    "torch's rng": (script(lambda said: said["rng"][0].update(torch=torch.ones(3))), "random numbers are damaged"),
    "numpy's rng": (script(lambda said: said["rng"][0]["numpy"].update(pos=10**9)), "numpy's place is 1000000000"),
    "Python's rng": (script(lambda said: said["rng"][0].update(python=(3, (1, 2), None))), "random numbers are damag"),
    "Python's normal numbers": (
        script(lambda said: said["rng"][0].update(python=(*said["rng"][0]["python"][:2], "x"))),
        "random numbers are damaged",
    ),
    "texts as position": (script(lambda said: said.update(position=["a", "b"])), "damaged: .*position"),
    "a long position": (script(lambda said: said.update(position=(1, 2, 3))), "damaged: .*position"),
    "a negative position": (script(lambda said: said.update(position=(1, -2))), "damaged: .*position"),
    "a huge seed": (script(lambda said: said.update(position=(1 << 64, 2))), "the seed is no number of 64 bits"),
    "a step": (script(lambda said: said.update(step="\x1b[31m")), "damaged: .*step"),
    "no optimizer": (script(lambda said: said.update(optimizer=[1])), "damaged: .*optimizer"),
    "half an optimizer": (script(lambda said: said["optimizer"].pop("states")), "damaged: .*states"),
    "groups": (script(lambda said: said["optimizer"].update(groups=[{"lr": 1.0}])), "damaged: .*params"),
    "parameters": (script(lambda said: said["optimizer"]["groups"][0].update(params=[[1]])), "damaged: .*params"),
    "a setting": (script(lambda said: said["optimizer"]["groups"][0].update(lr="x")), "lr is 'x' in group 0"),
    "a class": (
        script(lambda said: said["optimizer"].update({"class": "\x1b]0;x\x07"})),
        r"its optimizer is a \?\]0;x\?, yours",
    ),
    "another tensor of the state": (
        script(lambda said: said["optimizer"]["states"]["weight"].update({"\x1b[2J": {"\0tensor": 0}})),
        r"optimizer\.state\.weight\.\?\[2J is no tensor in the index",
    ),
    "no dict": (lambda place: torch.save([1], place / "script.pt"), "script.pt cannot be read"),
    "code": (lambda place: torch.save(os.mkdir, place / "script.pt"), "it names posix.mkdir"),
    "no part": (index(lambda said: _tensor(said, "model.weight").clear()), "model.weight is not whole"),
    "a hole": (
        index(lambda said: setattr(_tensor(said, "model.weight")[0], "sizes", torch.Size([1, 3]))),
        "model.weight is not whole",
    ),
    "an overlap": (
        index(lambda said: _tensor(said, "model.weight").append(_tensor(said, "model.weight")[0])),
        "model.weight is not whole",
    ),
    "a hole in the optimizer": (
        index(lambda said: _tensor(said, "optimizer.state.weight.exp_avg").clear()),
        r"optimizer\.state\.weight\.exp_avg is not whole",
    ),
    "a file that the manifest does not have": (index(_put_elsewhere), "it names other, which checkpoint.json does not"),
    "a subfolder": (
        index(lambda said: [setattr(each, "relative_path", "a/b") for each in said.storage_data.values()]),
        "points out of its folder",
    ),
    "control characters": (
        index(lambda said: _rename(said, "model.\x1b]0;pwned\x07")),
        r"model: bias is not in the checkpoint; \?\]0;pwned\? is not in the model",
    ),
    "another value in the place of a tensor": (
        index(lambda said: [setattr(v, "offset", 0) for v in said.storage_data.values()]),
        r"model\.weight in .*distcp is damaged: it is no tensor",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_has_changed(place: Path, name: str) -> None:
    change, message = CHANGES[name]
    change(place)
    seal(place)
    refused(place, message)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "script.pt", MANIFEST])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link to /dev/zero"),
        (lambda path: path.symlink_to("../aside"), r"is a symbolic link to \.\./aside"),
    ],
    ids=["pipe", "folder", "device", "link"],
)
def test_what_is_no_plain_file(place: Path, name: str, make: Callable[[Path], object], message: str) -> None:
    (place / name).rename(place.parent / "aside")
    make(place / name)
    refused(place, message)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "script.pt", MANIFEST])
def test_a_sparse_file_is_not_read(place: Path, name: str) -> None:
    os.truncate(place / name, 1 << 42)
    refused(place, "is damaged: it has 4398046511104 bytes")


def test_damaged_random_numbers_do_not_matter_where_they_are_not_wanted(place: Path) -> None:
    script(lambda said: said.update(rng=[{}]))(place)
    seal(place)
    assert Training(1).load(place, rng=False).step == 1


def test_random_numbers_are_checked_without_being_used() -> None:
    state, before = random_state(CPU), random.getstate()
    torch.rand(1), random.random(), np.random.rand()
    now = random.getstate()
    check_random_state(state, CPU)
    assert random.getstate() == now != before


def test_a_folder_may_be_reached_by_a_link(place: Path) -> None:
    (place.parent / "last").symlink_to("c")
    assert Training(1).load(place.parent / "last").step == 1
