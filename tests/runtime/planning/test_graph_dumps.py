"""dump_graph writes every graph that runs, as it is deployed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_training_and_evaluation_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_DUMP_GRAPH", "true")
    monkeypatch.setenv("RANNC_DUMP_GRAPH_PREFIX", str(tmp_path / "graph-"))
    inner = Dropping()
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    x = torch.randn(4, 6)
    model(x)
    (first,) = tmp_path.glob("*.json")
    written = first.stat().st_mtime_ns
    model.eval()
    model(x)
    model.train()
    model(torch.randn(3, 6))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {path.stem for path in tmp_path.glob("*.dot")} == set(found)
    assert len(found) == 2
    assert first.stat().st_mtime_ns == written
    assert {"in training" in told["call"] for told in found.values()} == {True, False}
    for told in found.values():
        ops = set(range(len(told["ops"])))
        assert {op for stage in told["stages"] for op in stage["ops"]} == ops
        assert {op for block in told["blocks"] for op in block["ops"]} == ops
        assert [stage["slots"] for stage in told["stages"]] == [[0]]


def test_a_plan_for_devices_that_are_not_there_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_DUMP_GRAPH", "true")
    monkeypatch.setenv("RANNC_DUMP_GRAPH_PREFIX", str(tmp_path / "graph-"))
    monkeypatch.setenv("RANNC_PARTITIONING_DRY_RUN_NP", "2")
    monkeypatch.setenv("RANNC_PARTITION_NUM", "2")
    inner = Dropping()
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    with pytest.raises(SystemExit):
        model(torch.randn(4, 6))
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["stages"]) == 2
