"""bench/paper.py: its plans are those of ``rannc-run``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from job import FORK, Job
from kept_results import KEPT, tables

ROWS, DEVICES, SEQUENCE = 4, 4, 32
TIGHT = """\
device = "Tesla V100-SXM2-32GB"
devices_per_node = 2
memory_gib = 0.09
memory_gb_per_s = 900.0
op_latency_us = 6.0

[tflops]
float64 = 7.8
float32 = 15.7
float16 = 125.0
bfloat16 = 15.7

[link.inside]
gb_per_s = 150.0
latency_us = 10.0

[link.between]
gb_per_s = 6.25
latency_us = 20.0
"""
SCRIPT = f"""\
import torch
import transformers
import pyrannc


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch).loss


with torch.device("meta"):
    model = Loss(transformers.BertForPreTraining(transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        max_position_embeddings={SEQUENCE}, attn_implementation="sdpa",
    )))
model = pyrannc.RaNNCModule(model, torch.optim.AdamW(model.parameters()))
ids = torch.randint(1000, ({ROWS}, {SEQUENCE}))
model(input_ids=ids, token_type_ids=ids % 2, labels=ids, next_sentence_label=torch.zeros({ROWS}, dtype=torch.long))
"""


@pytest.mark.long
@pytest.mark.ranks
def test_plan_is_that_of_rannc_run(job: Job, tmp_path: Path) -> None:
    """For a small BERT on devices that cannot hold it whole."""
    (tmp_path / "tight.toml").write_text(TIGHT)
    (tmp_path / "train.py").write_text(SCRIPT)
    cluster, kept = str(tmp_path / "tight.toml"), tmp_path / "kept"
    job.run(
        sys.executable, "bench/paper.py", "bert", "--hidden", "128", "--layers", "2", "--cluster", cluster,
        "--devices", str(DEVICES), "--batch", str(ROWS * DEVICES), "--sequence", str(SEQUENCE), **{KEPT: str(kept)},
    )  # fmt: skip
    ((row,),) = tables(kept).values()
    shown = job.run(
        "rannc-run", "--plan-only", "--cluster", cluster, "-np", str(DEVICES), FORK, "train.py", folder=tmp_path
    )
    told = re.search(
        r"(?s) (?P<stages>\d+) stages?\n.* ranks x (?P<microbatches>\d+) microbatch.*\nstep +(?P<ms>\S+) ms predicted"
        r".*\nmemory +(?P<mib>\S+) MiB",
        shown,
    )
    assert told is not None, shown
    assert row["plan"] == f"{DEVICES}-way data parallel, ZeRO 2"
    assert told["stages"] == "1"
    assert "schedule  1f1b, ZeRO 2;" in shown
    assert row["microbatches"].startswith(f"{told['microbatches']} x ")
    assert float(row["samples/s"]) == pytest.approx(ROWS * DEVICES / float(told["ms"]) * 1e3, rel=1e-3)
    assert float(row["GiB"]) == pytest.approx(float(told["mib"]) / 1024, abs=0.051)
    assert row["data parallel"] == "is the plan"
    assert re.fullmatch(r"none that fits|.* \d+\.\d+x", row["next best"].replace("at least ", ""))
