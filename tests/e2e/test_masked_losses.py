"""Ranks without a single label that counts: what one process that emulates the ranks would do, in any plan."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks

SCRIPT = """
import copy, sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 12))
        self.criterion = nn.CrossEntropyLoss(torch.linspace(0.2, 2, 12) if WEIGHTED else None, label_smoothing=0.1)

    def forward(self, tokens, labels):
        return self.criterion(self.layers(self.table(tokens)).transpose(1, 2), labels)

WEIGHTED = "weighted" in sys.argv
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
alone = "alone" in sys.argv
if not alone:
    import pyrannc
    wrapped = pyrannc.RaNNCModule(model, optimizer)

def batch(step, rank):
    torch.manual_seed(10 * step + rank)
    tokens = torch.randint(12, (2 + 2 * rank, 5))
    labels = tokens.masked_fill(torch.arange(5) >= torch.randint(1, 6, (len(tokens), 1)), -100)
    if step == 1 and rank == 1:
        labels.fill_(-100)
    return tokens, labels

for step in range(4):
    optimizer.zero_grad()
    if alone:
        loss = sum(model(*batch(step, rank)) * (2 + 2 * rank) / 6 for rank in range(2))
    else:
        loss = wrapped(*batch(step, pyrannc.get_rank()))
    loss.backward()
    optimizer.step()
    rank = 0 if alone else pyrannc.get_rank()
    print(f"rank={rank} step={step} loss={loss.item():.12f}", flush=True)
"""


def _losses(output: str) -> dict[tuple[int, int], float]:
    found = re.findall(r"rank=(\d+) step=(\d+) loss=(\S+)", output)
    return {(int(rank), int(step)): float(loss) for rank, step, loss in found}


@pytest.mark.parametrize(
    ("weights", "stages", "microbatches"), first(1, [("weighted", 2, 2), ("plain", 1, 2), ("plain", 2, 1)])
)
def test_a_mini_batch_of_padding_alone(job: Job, tmp_path: Path, weights: str, stages: int, microbatches: int) -> None:
    """The loss is NaN as torch's own; gradients of that mini-batch are zero, so training may go on."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plan = {"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}
    if stages == 1:
        told = job.train(2, str(script), weights, code=1, **plan)
        assert "NaN, because all labels of this rank's mini-batch are ignored or masked" in told
    found = _losses(job.train(2, str(script), weights, RANNC_CHECK_NAN="off", **plan))
    expected = _losses(job.alone(str(script), weights, "alone"))
    assert len(expected) == 4
    assert math.isnan(expected[0, 1])
    for rank in range(2):
        for step in range(4):
            assert found[rank, step] == pytest.approx(expected[0, step], rel=1e-9, nan_ok=True)
