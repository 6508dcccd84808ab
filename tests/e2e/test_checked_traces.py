"""On real ranks: custom Functions under any name train in stages, and a new trace is compared with the model once."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import DEBUG, Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/aliased.py"
CHECKED = "The trace gives the same results as the model"


@pytest.mark.long
def test_functions_in_two_stages_and_from_the_cache(job: Job) -> None:
    first = job.train(2, PROGRAM, RANNC_PARTITION_NUM="2", **DEBUG)
    assert first.count(": equal") == 2
    assert "the autograd.Function __main__.Triple runs as one operator" in first
    assert first.count(CHECKED) == 2  # training; evaluation, on values of which rank 0 holds a half
    assert "hooks" in job.run("rannc-cache", "ls")
    second = job.train(2, PROGRAM, RANNC_PARTITION_NUM="2", **DEBUG)
    assert second.count(": equal") == 2
    assert second.count("Using trace") == 2
    assert CHECKED not in second


@pytest.mark.long
def test_a_trace_that_was_kept_unseen_is_compared_by_the_next_run(job: Job) -> None:
    unseen = job.train(2, PROGRAM, RANNC_PARTITION_NUM="2", RANNC_VERIFY_TRACE="false", RANNC_CACHE="refresh", **DEBUG)
    assert CHECKED not in unseen
    seen = job.train(2, PROGRAM, RANNC_PARTITION_NUM="2", **DEBUG)
    assert seen.count("Using trace") == 2
    assert seen.count(CHECKED) == 2
    assert CHECKED not in job.train(2, PROGRAM, RANNC_PARTITION_NUM="2", **DEBUG)


ONE_OUTPUT = """
import pyrannc
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
model(torch.randn(4, 8)).mean().backward()
model.eval()
model(torch.randn(4, 8))
"""


def test_a_tensor_of_one_element_of_another_stage_does_not_prevent_a_comparison(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "one_output.py"
    script.write_text(ONE_OUTPUT)
    output = job.train(2, str(script), RANNC_PARTITION_NUM="2", **DEBUG)
    assert output.count(CHECKED) == 2, output  # training; evaluation, where rank 0 lacks the bias of the last layer
    assert "was not compared" not in output


@pytest.mark.long
def test_too_many_stages_name_the_code_that_cannot_be_cut(job: Job) -> None:
    told = job.train(2, "tests/e2e/programs/one_block.py", code=1, RANNC_PARTITION_NUM="2")
    assert "the model divides into 1 block only; use at most 1 stage." in told
    assert "Nothing inside the model (Net) can be split over stages" in told
