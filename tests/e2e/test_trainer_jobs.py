"""`RaNNCTrainer` on real ranks, beside Trainer under DistributedDataParallel; the program compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/trainer_jobs.py"
TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_LOG_LEVEL": "warn"}
WAYS = ("smoothed", "own", "best", "bfloat16", "adapters", "padded")
MODELS = (
    ("gpt-j", "gpt-neox", "opt", "bloom", "llama", "mistral"),
    ("qwen3", "gemma2", "phi3", "falcon", "mixtral, looped", "mamba"),
)


def test_it_trains_as_trainer_does_and_goes_on_with_other_ranks(job: Job, tmp_path: Path) -> None:
    assert job.train(2, PROGRAM, "parity", str(tmp_path), **TWO).count("parity is right") == 2
    assert job.alone(PROGRAM, "resume", str(tmp_path), "RaNNCTrainer").count("resume is right") == 1
    output = job.train(2, PROGRAM, "resume", str(tmp_path), "Trainer", **TWO)
    assert output.count("resume is right") == 2


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_else_trainer_does(job: Job, tmp_path: Path, way: str) -> None:
    assert job.train(2, PROGRAM, way, str(tmp_path), **TWO).count(f"{way} is right") == 2


@pytest.mark.long
@pytest.mark.parametrize("names", MODELS, ids=["first half", "second half"])
def test_language_models_of_the_zoo(job: Job, tmp_path: Path, names: tuple[str, ...]) -> None:
    output = job.train(2, PROGRAM, "models", str(tmp_path), *names, **TWO)
    assert all(f"{name} is right" in output for name in names)


def test_options_that_would_do_something_else(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch import nn\n"
        "from transformers import TrainingArguments\n"
        "from pyrannc.integrations.transformers import RaNNCTrainer\n"
        "for option in ('torch_compile', 'auto_find_batch_size'):\n"
        f"    args = TrainingArguments({str(tmp_path)!r}, report_to=[], use_cpu=True, **{{option: True}})\n"
        "    RaNNCTrainer(model=nn.Linear(1, 1), args=args)\n"
        "    print(option, 'goes on')\n"
    )
    output = job.train(1, str(script), code=1, CUDA_VISIBLE_DEVICES="")
    assert output.count("torch.compile of a RaNNCModule compiles nothing") == 1
    assert "torch_compile goes on" in output
    assert "remove it: the plan fits per_device_train_batch_size into memory" in output


def test_ranks_that_trainer_does_not_see_are_told(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch import nn\n"
        "from transformers import TrainingArguments\n"
        "from pyrannc.integrations.transformers import RaNNCTrainer\n"
        f"RaNNCTrainer(model=nn.Linear(1, 1), args=TrainingArguments({str(tmp_path)!r}, report_to=[]))\n"
    )
    output = job.train(2, str(script), code=1, CUDA_VISIBLE_DEVICES="")
    assert "the job has 2 ranks, but Trainer sees 1, so that each would read the same data" in output
