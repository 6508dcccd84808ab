"""`PlanMetrics` on real ranks: TensorBoard, Weights & Biases offline, a log, a function."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from job import Job

import pyrannc
from pyrannc.integrations.trackers import PlanMetrics
from rannd.errors import UsageError

pytestmark = pytest.mark.ranks


def test_trackers_are_told_what_a_plan_does(job: Job, tmp_path: Path) -> None:
    two = {"RANNC_PARTITION_NUM": "2", "RANNC_CALIBRATE_AFTER": "6"}
    output = job.train(2, "tests/e2e/programs/tracked.py", str(tmp_path), **two)
    assert output.count("tracked on rank") == 2
    lines = re.findall(r"step (\d+): predicted_step_ms [\d.e-]+, .* memory_mib/rank1 \d+", output)
    assert lines == ["8", "16", "24"], "of rank 0 alone"


def test_the_first_call_does_not_count_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It traces and plans, which takes much longer than a step."""
    import torch
    from torch import nn

    monkeypatch.setenv("RANNC_CACHE", "off")
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    told: dict[int, list[dict[str, float]]] = {1: [], 3: []}
    trackers = [PlanMetrics(model, lambda found, _, every=n: told[every].append(dict(found)), every=n) for n in told]
    begun = time.monotonic()
    for call in range(3):
        model(torch.randn(4, 8)).sum().backward()
        if call == 0:
            first_ms = 1e3 * (time.monotonic() - begun)
        for each in trackers:
            each.step()
    pyrannc.clear()
    assert "rannd/predicted_step_ms" in told[1][0]
    assert ["rannd/call_ms" in each for each in told[1]] == [False, True, True]
    assert 0 < told[3][0]["rannd/call_ms"] < first_ms / 3


def test_what_is_no_tracker_is_told() -> None:
    from torch import nn

    model = pyrannc.RaNNCModule(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="use a SummaryWriter, a run of wandb, a Logger or a function"):
        PlanMetrics(model, "tensorboard")
    with pytest.raises(UsageError, match="every=0"):
        PlanMetrics(model, print, every=0)
    pyrannc.clear()
