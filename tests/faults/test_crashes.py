"""Power cuts while checkpoints are saved: in each state that a disk may be in, the last acknowledged one loads.

The calls of a job that saves three times are recorded, and replayed up to each of them with every legal loss.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from faults.crash_states import Call, Recording, write
from faults.faulty import run
from torch import nn

import pyrannc
from rannd.errors import CheckpointError

STEPS = 3


def loaded(folder: Path) -> int | None:
    """The step of a checkpoint; None where there is none."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = pyrannc.RaNNCModule(net, optimizer)
    try:
        step = pyrannc.load_checkpoint(folder, model, optimizer).step
    except CheckpointError:
        return None
    finally:
        pyrannc.clear()
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())
    return step


@pytest.mark.long
@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_the_last_acknowledged_checkpoint_survives_a_power_cut(tmp_path: Path, way: str) -> None:
    root, log, data = tmp_path / "disk", tmp_path / "log", tmp_path / "data"
    root.mkdir()
    variables = {"FAULTS_LOG": str(log), "FAULTS_DATA": str(data)} | (
        {"FAULTS_NO_EXCHANGE": "1"} if way != "exchange" else {}
    )
    run("save_steps.py", str(root), str(STEPS), under=root, **variables)
    recording = Recording.read(root, log, data)
    assert len(recording.acked) == STEPS
    assert {call.kind for call in recording.calls} >= {"mkdir", "create", "write", "fsync", "rename", "unlink"}
    tried, found = 0, set()
    for acked, tree in recording.states():
        place = tmp_path / "state"
        write(tree, place)
        step = loaded(place / "runs" / "first")
        assert step is not None or acked < 0, f"step {acked} was acknowledged, and is gone: {_names(tree)}"
        assert step is None or acked <= step < STEPS, f"step {acked} was acknowledged, {step} is found"
        found.add((acked, step))
        shutil.rmtree(place)
        tried += 1
    assert {step for _, step in found} == {None, *range(STEPS)}
    assert tried > 100
    print(f"{len(recording.calls)} calls, {tried} states")


def _names(tree: object) -> object:
    return {name: _names(each) for name, each in tree.items()} if isinstance(tree, dict) else len(tree)  # type: ignore[arg-type]


def test_a_replay_loses_what_was_not_synced() -> None:
    calls = [
        Call("create", (0,), ("new",), 1),
        Call("write", inode=1, data=b"1234"),
        Call("rename", (0, 0), ("new", "place"), 1),
        Call("fsync", inode=0),
    ]
    states = [tree for _, tree in Recording(calls).states()]
    assert {"place": b""} in states, "renamed before its content was synced"
    assert {"place": b"12"} in states
    assert {"place": bytes(4)} in states
    assert {"new": b"1234"} in states
    assert {} in states
    synced = [*calls[:2], Call("fsync", inode=1), *calls[2:]]
    assert {tree["place"] for _, tree in Recording(synced).states() if "place" in tree} == {b"1234"}
