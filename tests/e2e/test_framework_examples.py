"""The examples of frameworks run as their first lines say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from job import FORK, ROOT, Job

pytestmark = [pytest.mark.ranks, pytest.mark.long]

FOLDER = ROOT / "examples" / "frameworks"
DIGITS = {"accelerate_loop.py", "lightning_trainer.py", "torchrun_loop.py"}


def accuracy(output: str) -> float:
    (found,) = re.findall(r"accuracy=([\d.]+)", output)
    return float(found)


@pytest.mark.parametrize("script", sorted(DIGITS))
def test_digits(job: Job, tmp_path: Path, script: str) -> None:
    output = job.run("rannc-run", "-np", "2", FORK, str(FOLDER / script), folder=tmp_path, RANNC_PARTITION_NUM="2")
    assert "2 stages: " in output
    assert accuracy(output) > 0.9


def test_trainer(job: Job, tmp_path: Path) -> None:
    output = job.run("rannc-run", "-np", "2", FORK, str(FOLDER / "trainer.py"), folder=tmp_path)
    (loss,) = re.findall(r"eval_loss=([\d.]+)", output)
    assert float(loss) < 1.0, "0.28 would be all that is to be known: the first token of 16 is random"
    assert (tmp_path / "counting" / "last" / "model.safetensors").exists()
    assert "rannd/samples_per_s" in output


def test_torchrun(job: Job, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(FOLDER / "torchrun_loop.py"))
    assert accuracy(job.run(*command, folder=tmp_path)) > 0.9


def test_ray_train(job: Job, tmp_path: Path) -> None:
    output = job.run(sys.executable, str(FOLDER / "ray_train.py"), folder=tmp_path, RAY_TMPDIR="/tmp")
    assert accuracy(output) > 0.9
    assert "ranks=2" in output


def test_no_example_is_forgotten() -> None:
    scripts = {file.name for file in FOLDER.glob("*.py")} - DIGITS
    assert scripts == {"digits_data.py", "trainer.py", "ray_train.py"}
