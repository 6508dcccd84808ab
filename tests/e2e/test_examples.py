"""The examples run unchanged on 1, 2 and 4 ranks; the first lines say how they are started."""

from __future__ import annotations

import os
import re

import pytest
from job import FORK, ROOT, Job
from thinned import first

EXAMPLES = ROOT / "examples"
TINY_GPT2 = ["--layers", "2", "--embd", "32", "--heads", "2", "--seq", "32", "--batch", "4", "--steps", "21"]

pytestmark = pytest.mark.ranks


def _run(job: Job, ranks: int, script: str, *arguments: str, forked: bool = True, **variables: str) -> str:
    """What the ranks print."""
    command = ("rannc-run", "-np", str(ranks), *([FORK] if forked else ()), str(EXAMPLES / script))
    return job.run(*command, *arguments, folder=job.home.folder(), **variables)


def _finished(output: str) -> list[int]:
    return sorted(int(rank) for rank in re.findall(r"Finished on rank(\d+)", output))


@pytest.mark.parametrize("ranks", first(1, [2, 1, 4]))
def test_tutorial(job: Job, ranks: int) -> None:
    output = _run(job, ranks, "tutorial.py", "16", "32", "6", forked=ranks > 1)
    assert _finished(output) == list(range(ranks))
    assert output.count("#Parameters=6336") == 1
    losses = re.findall(r"rank=(\d+) step=(\d+) loss=(\d+\.\d+)", output)
    assert sorted((int(rank), int(step)) for rank, step, _ in losses) == [
        (r, s) for r in range(ranks) for s in range(3)
    ]


def _losses(output: str) -> list[float]:
    """Training losses that rank 0 printed, then the held-out one."""
    return [float(loss) for loss in re.findall(r"(?:step=\d+|held-out) loss=(\d+\.\d+)", output)]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(2, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_gpt2_learns(job: Job, ranks: int) -> None:
    output = _run(job, ranks, "gpt2_bytes.py", *TINY_GPT2, "--lr", "0.01")
    assert _finished(output) == list(range(ranks))
    losses = _losses(output)
    assert len(losses) == 4  # steps 0, 10 and 20, and held-out
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing is known yet
    assert losses[2] < 4.5
    assert losses[3] < 4.5


@pytest.mark.full
def test_gpt2_in_three_stages_sees_the_same_losses(job: Job) -> None:
    whole = _losses(_run(job, 4, "gpt2_bytes.py", *TINY_GPT2, RANNC_PARTITION_NUM="1"))
    staged = _losses(_run(job, 4, "gpt2_bytes.py", *TINY_GPT2, RANNC_PARTITION_NUM="3", RANNC_PIPELINE_NUM="2"))
    assert staged == pytest.approx(whole, abs=2e-3)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.full),
        (2, 2),
        *(pytest.param(4, stages, marks=pytest.mark.full) for stages in (1, 4)),
    ],
)
def test_digits_are_learned(job: Job, ranks: int, stages: int) -> None:
    output = _run(job, ranks, "digits.py", RANNC_PARTITION_NUM=str(stages))
    assert _finished(output) == list(range(ranks))
    assert re.search(rf" Plan.*: {stages} stages?: ", output)
    (accuracy,) = re.findall(r"test accuracy=(\d\.\d+) of 360 images", output)
    assert float(accuracy) >= 0.97


def test_no_file_appears_in_the_working_directory(job: Job) -> None:
    before = set(os.listdir(EXAMPLES))
    _run(job, 1, "tutorial.py", "4", "8", "2")
    assert set(os.listdir(EXAMPLES)) <= before | {"__pycache__"}
    assert [path for path in job.home.path.glob("job*") if any(path.iterdir())] == []
