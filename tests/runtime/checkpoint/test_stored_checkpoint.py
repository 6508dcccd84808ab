"""A checkpoint that an earlier version wrote on two ranks loads on one, and what is written now has the same form."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_run import WIDTH, StoredRun, state, value

import pyrannc
from rannd.runtime.storage.dcp_metadata import read_index

STORED = Path(__file__).parent / "stored"


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, types of containers and tensors included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "stored"))


@pytest.mark.parametrize("deployed", [False, True])
def test_it_loads(stored: Path, deployed: bool) -> None:
    run = StoredRun()
    if deployed:
        run.model(torch.ones(2, WIDTH)).sum().backward()
    found = pyrannc.load_checkpoint(stored, run.model, run.optimizer)
    assert (found.step, found.extra) == (11, {"epoch": (1, None)})
    for name, p in run.inner.named_parameters():
        assert torch.equal(p, value(name, p)), name
    assert run.inner.calls == 1
    assert run.inner.note == "stored"
    assert run.optimizer.rounds == 9
    assert run.optimizer.state["counter"] == {"n": 7}  # type: ignore[index]
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.5, 0.25]
    assert all(group["betas"] == (0.9, 0.99) and group["mode"] == "nested" for group in run.optimizer.param_groups)
    held = dict(run.inner.named_parameters()) | {"own": run.own}
    frozen = held.pop("one.bias")
    assert frozen not in run.optimizer.state
    for name, p in held.items():
        wanted = state(name, p)
        wanted["half"] = wanted["half"].float()  # torch gives state, but for "step", the type of its parameter
        assert same(run.optimizer.state[p], wanted), name


def test_it_is_written_alike(stored: Path, tmp_path: Path) -> None:
    run = StoredRun()
    pyrannc.load_checkpoint(stored, run.model, run.optimizer)
    for name, p in {**dict(run.inner.named_parameters()), "own": run.own}.items():
        if p.requires_grad:
            run.optimizer.state[p] = state(name, p)
    pyrannc.save_checkpoint(tmp_path / "again", run.model, run.optimizer, step=11, extra={"epoch": (1, None)})
    before, after = (torch.load(path / "script.pt", weights_only=True) for path in (stored, tmp_path / "again"))
    assert len(before.pop("rng")) == 2
    assert len(after.pop("rng")) == 1
    assert same(before, after)
    first, second = (read_index(path) for path in (stored, tmp_path / "again"))
    assert first.state_dict_metadata == second.state_dict_metadata
