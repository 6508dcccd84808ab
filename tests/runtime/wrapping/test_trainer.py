"""Hugging Face's Trainer in one process: what it asks of a `RaNNCModule`, and what `RaNNCTrainer` refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import pyrannc
from pyrannc.integrations.transformers import RaNNCTrainer
from rannd.errors import UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, **options)


@pytest.mark.parametrize("kind", [Trainer, RaNNCTrainer])
def test_a_model_that_is_wrapped_already_is_refused(tmp_path: Path, kind: type[Trainer]) -> None:
    model = pyrannc.RaNNCModule(Net())
    with pytest.raises(UsageError, match="RaNNCTrainer instead, with the model itself"):
        kind(model=model, args=arguments(tmp_path))
    assert getattr(model, "hf_device_map", None) is None, "others may ask"


def test_a_wrapper_has_the_name_of_its_model() -> None:
    assert pyrannc.RaNNCModule(Net())._get_name() == "Net"


def test_any_module_trains_and_is_saved(tmp_path: Path) -> None:
    rows = [{"x": torch.full((4,), float(row)), "labels": torch.ones(1)} for row in range(16)]
    trainer = RaNNCTrainer(model=Net(), args=arguments(tmp_path, save_steps=1), train_dataset=rows)
    before = trainer.model.layer.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.layer.weight, before)
    assert (tmp_path / "checkpoint-1" / "rannc").is_dir()
    assert not (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    again = RaNNCTrainer(model=Net(), args=arguments(tmp_path), train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(again.model.layer.weight, trainer.model.layer.weight, rtol=0, atol=0)
