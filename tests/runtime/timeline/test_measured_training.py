"""A training of one rank measures itself: which steps count, when their times are stored, what a timeline has."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc
from rannd.daemon.client.cache import connect
from rannd.daemon.common.keys import measured_key
from rannd.errors import UsageError
from rannd.plan.measured_step import MeasuredStep, decode_measured


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def train(model: pyrannc.RaNNCModule, steps: int, rows: int = 8) -> None:
    for _ in range(steps):
        model(torch.randn(rows, 8)).backward()


def measured(model: pyrannc.RaNNCModule) -> MeasuredStep | None:
    measuring = model._session.measuring
    assert measuring is not None
    return measuring.measured


@pytest.fixture(autouse=True)
def plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "4")


def test_times_are_gathered_once_there_are_enough_steps() -> None:
    model = pyrannc.RaNNCModule(Model())
    train(model, 21)
    assert measured(model) is None, "the first step is not counted"
    told: list[MeasuredStep] = []
    assert model._session.measuring is not None
    model._session.measuring.gathered.append(told.append)
    train(model, 5)
    found = measured(model)
    assert found is not None
    assert told == [found]
    (rank,) = found.ranks
    assert rank.steps == 20
    (stage,) = rank.stages
    assert stage.pieces == 4
    assert 0 < stage.forward.own_us <= stage.forward.median_us
    assert 0 < stage.backward.own_us <= stage.backward.median_us
    assert stage.weight.median_us == 0
    assert rank.computing_us < rank.step_us
    assert rank.between_us > 0
    assert rank.waits == ()


def test_only_steps_as_they_were_planned_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    model = pyrannc.RaNNCModule(Model())
    train(model, 3)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(8, 8))
    model.eval()
    train(model, 4)
    model.train()
    train(model, 4, rows=6)
    pyrannc.delay_grad_allreduce(True)
    train(model, 4)
    pyrannc.delay_grad_allreduce(False)
    train(model, 1)
    assert measured(model) is None
    train(model, 1)
    found = measured(model)
    assert found is not None
    assert found.ranks[0].steps == 3


@pytest.mark.parametrize(("item", "value"), [("CALIBRATE_AFTER", "0"), ("TRACE_EVENTS", "off")])
def test_nothing_is_gathered_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch, item: str, value: str) -> None:
    monkeypatch.setenv(f"RANNC_{item}", value)
    model = pyrannc.RaNNCModule(Model())
    train(model, 26)
    assert measured(model) is None


def test_a_deployment_is_measured_anew_after_it_was_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    model = pyrannc.RaNNCModule(Model())
    train(model, 6)
    assert measured(model) is not None
    model.undeploy()
    assert model._session.measuring is None
    train(model, 4)
    assert measured(model) is None
    train(model, 1)
    assert measured(model) is not None


def test_times_are_stored_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "on")
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    model = pyrannc.RaNNCModule(Model())
    train(model, 6)
    promise, deployment = model._session.promise, model.deployment
    assert promise is not None
    assert promise.key is not None
    assert deployment is not None
    with connect(mode="on", timeout_s=30, idle_s=300, max_bytes=1 << 30) as client:
        stored = client.get(measured_key(promise.key.digest))
    assert stored is not None
    assert decode_measured(stored, deployment) == measured(model)


def events(file: Path) -> list[dict[str, object]]:
    return [each for each in json.loads(file.read_text())["traceEvents"] if each["ph"] == "X"]


@pytest.mark.parametrize("inside", ["true", "false"])
def test_the_timeline_of_a_step_has_its_computations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: str
) -> None:
    file = tmp_path / "step.json"
    monkeypatch.setenv("RANNC_EVENT_TRACE_FILE", str(file))
    monkeypatch.setenv("RANNC_INTERLEAVE_LOSS", inside)
    model = pyrannc.RaNNCModule(Model())
    train(model, 11)
    assert not file.exists()
    train(model, 1)
    wanted = sorted(f"{kind}{piece}" for kind in "FB" for piece in range(4))
    names = Counter(each["name"] for each in events(file) if each["cat"] == "compute")
    assert names == Counter([*wanted, *wanted]), "measured and predicted"
    file.unlink()
    train(model, 1)
    pyrannc._dump_events()
    assert len(events(file)) > len(wanted)


def test_a_dump_that_writes_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def dumped() -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            pyrannc._dump_events()
        return "\n".join(record.getMessage() for record in caplog.records)

    assert "no model is deployed" in dumped()
    model = pyrannc.RaNNCModule(Model())
    train(model, 3)
    assert "set event_trace_file (RANNC_EVENT_TRACE_FILE)" in dumped()
    pyrannc.clear()
    assert "no model is deployed" in dumped()
    folder = tmp_path / "none"
    monkeypatch.setenv("RANNC_EVENT_TRACE_FILE", str(folder / "step.json"))
    with pytest.raises(
        UsageError, match=r"event_trace_file .* the timeline cannot be written to .*: No such file or dir"
    ):
        pyrannc.RaNNCModule(Model())
    folder.mkdir()
    model = pyrannc.RaNNCModule(Model())
    assert list(folder.iterdir()) == []
    folder.rmdir()
    train(model, 2)
    assert "ranks [0] have not recorded a whole step" in dumped()
    train(model, 2)
    assert "the timeline cannot be written to" in dumped()
    train(model, 1)
