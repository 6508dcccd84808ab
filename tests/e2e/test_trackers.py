"""`PlanMetrics` on real ranks: TensorBoard, Weights & Biases offline, a log, a function."""

from __future__ import annotations

import re
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


def test_what_is_no_tracker_is_told() -> None:
    from torch import nn

    model = pyrannc.RaNNCModule(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="use a SummaryWriter, a run of wandb, a Logger or a function"):
        PlanMetrics(model, "tensorboard")
    with pytest.raises(UsageError, match="every=0"):
        PlanMetrics(model, print, every=0)
    pyrannc.clear()
