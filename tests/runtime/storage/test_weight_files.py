"""Files with values: what is found in them, and what broken or malicious ones do."""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import pyrannc
from rannd.errors import CheckpointError
from rannd.runtime.storage.weight_files import Given, match, open_weights

STATE = {"a.weight": torch.randn(3, 4), "b": torch.arange(5), "half": torch.ones(2, dtype=torch.bfloat16)}


def one_file(folder: Path) -> Path:
    save_file(STATE, folder / "it.safetensors")
    return folder / "it.safetensors"


def parts(folder: Path) -> Path:
    for name, value in STATE.items():
        save_file({name: value}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in STATE}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**STATE, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("write", [one_file, parts, distributed])
def test_tensors_are_read_one_by_one(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    found = open_weights(write(tmp_path))
    assert dict(found.shapes) == {name: tuple(value.shape) for name, value in STATE.items()}
    for name, value in STATE.items():
        read = found.read(name)
        assert read.dtype == value.dtype
        assert torch.equal(read, value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not there: name a .safetensors file"),
        (lambda folder: folder.mkdir(), "is none of them: name a .safetensors file"),
        (lambda folder: folder.write_bytes(b"x"), "is none of them"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "it")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_weights(tmp_path / "it")


def test_broken_files_are_named(tmp_path: Path) -> None:
    file = one_file(tmp_path)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="is no file of safetensors that can be read"):
        open_weights(file)
    folder = tmp_path / "parts"
    folder.mkdir()
    parts(folder)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors is no file"):
        open_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "../it.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names '\.\./it\.safetensors', which is no file beside it"):
        open_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        open_weights(folder)


def test_a_folder_of_torch_is_read_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code in its index runs (test_checkpoint.py has more of these), and damage is named."""

    class Run:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, ("__import__('pathlib').Path('ran').write_text('')",)

    monkeypatch.chdir(tmp_path)
    folder = distributed(tmp_path / "it")
    before = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Run()}))
    with pytest.raises(CheckpointError, match=r"index .* is damaged, or not one: it names builtins.eval"):
        open_weights(folder)
    assert not Path("ran").exists()
    (folder / ".metadata").write_bytes(before)
    found = open_weights(folder)
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"a.weight cannot be read from .*it: "):
        found.read("a.weight")


def test_names_in_messages_have_no_control_characters(tmp_path: Path) -> None:
    name = "\x1b]0;pwned\x07"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({name: torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    weights = open_weights(tmp_path)
    for file in tmp_path.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"^\?\]0;pwned\? cannot be read") as caught:
        weights.read(name)
    assert str(caught.value).isprintable()
    with pytest.raises(CheckpointError, match=r"unexpected \[\?\]0;pwned\?\]") as caught:
        pyrannc.RaNNCModule(nn.Linear(2, 2), checkpoint=tmp_path)
    assert str(caught.value).isprintable()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "a.safetensors"}}))
    save_file({"other": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"names \?\]0;pwned\?, which is not in its file"):
        open_weights(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = parts(tmp_path)
    (folder / "b.safetensors").unlink()
    os.mkfifo(folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors is no file .* not a regular file"):
        open_weights(folder)


def test_names_of_a_model_are_found_behind_a_prefix_and_tied_ones_under_any_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("made", torch.ones(1), persistent=False)

    model = Tied()
    first = {"one.weight": "one.weight", "two.weight": "one.weight", "kept": "kept", "made": "made"}
    given = {"net.two.weight": torch.ones(2, 2), "net.kept": torch.ones(1), "optimizer.state": torch.ones(1)}
    found = match(model, first, Given(given))
    assert dict(found.names) == {"one.weight": "net.two.weight", "kept": "net.kept"}
    assert found.missing == found.unexpected == ()
    found = match(model, first, Given({"kept": torch.ones(1), "made": torch.ones(1)}))
    assert found.missing == ("one.weight", "two.weight")
    assert found.unexpected == ("made",)
    model._keys_to_ignore_on_load_unexpected = ["ma.e"]
    assert match(model, first, Given({"kept": torch.ones(1), "made": torch.ones(1)})).unexpected == ()
