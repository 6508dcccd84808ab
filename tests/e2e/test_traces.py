"""Tracing in real jobs: leaves, cached traces, models that are on the meta device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from job import DEBUG, PLANNED, Job

pytestmark = pytest.mark.ranks

MODEL = """
import torch
from torch import nn

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, a):
        self.calls += 1
        return Twice.apply(self.one(a) if a.sum() > 0 else self.two(a))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.choice = Deciding()

    def forward(self, a):
        for layer in self.layers:
            a = a + layer(a) * SCALE
        return self.choice(a)

SCALE = 0.5
"""

SCRIPT = """
import torch, pyrannc
from model import Model

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = pyrannc.RaNNCModule(model, optimizer)
torch.manual_seed(1 + pyrannc.get_rank())
for step in range(4):
    optimizer.zero_grad()
    loss = wrapped(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank={pyrannc.get_rank()} step={step} loss={loss.item():.12f}", flush=True)
wrapped.eval()
with torch.no_grad():
    print(f"rank={pyrannc.get_rank()} eval={wrapped(torch.ones(2, 8)).sum().item():.12f}", flush=True)
"""

ALONE = """
import torch
from model import Model

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = []
for rank in range(2):
    torch.manual_seed(1 + rank)
    data.append([torch.randn(4, 8) for _ in range(4)])
for step in range(4):
    optimizer.zero_grad()
    losses = [model(data[rank][step]).square().mean() for rank in range(2)]
    (sum(losses) / 2).backward()
    optimizer.step()
    for rank, loss in enumerate(losses):
        print(f"rank={rank} step={step} loss={loss.item():.12f}")
"""


def _write(folder: Path) -> Path:
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "alone.py").write_text(ALONE)
    return folder / "train.py"


def _values(output: str) -> list[str]:
    return sorted(re.findall(r"rank=\d+ (?:step=\d+ loss|eval)=[-0-9.]+", output))


def _assert_losses(output: str, alone: str, *, steps: int, tolerance: float = 1e-9) -> None:
    """Ranks have the losses of a lone process, which prints those of all ranks, or of one where all are alike."""

    def losses(text: str) -> dict[tuple[int, int], float]:
        found = re.findall(r"rank=(\d+) step=(\d+) loss=(\S+)", text)
        return {(int(rank), int(step)): float(loss) for rank, step, loss in found}

    found, expected = losses(output), losses(alone)
    alike = {rank for rank, _ in expected} == {0}
    assert {step for _, step in expected} == set(range(steps))
    assert {rank for rank, _ in found} == {0, 1}
    assert len(found) == 2 * steps
    for (rank, step), loss in found.items():
        assert abs(loss - expected[0 if alike else rank, step]) < tolerance, (rank, step)


def test_a_model_with_leaves_trains_in_stages_like_one_process(job: Job, tmp_path: Path) -> None:
    script = _write(tmp_path)
    output = job.train(2, str(script), RANNC_PARTITION_NUM="2")
    assert "Tracing: module choice (Deciding) runs as one operator" in output
    assert f"{PLANNED}2 stages: " in output
    alone = job.alone(str(tmp_path / "alone.py"))
    _assert_losses(output, alone, steps=4)


def test_the_second_run_does_not_trace(job: Job, tmp_path: Path) -> None:
    script = _write(tmp_path)
    job.run("rannc-cache", "clear")
    first, second = (job.train(2, str(script), RANNC_PARTITION_NUM="1", **DEBUG) for _ in range(2))
    assert len(re.findall("Using trace [0-9a-f]+ from the cache", first)) == 0, first
    assert len(re.findall("Using trace [0-9a-f]+ from the cache", second)) == 2, second  # training, evaluation
    assert _values(first) == _values(second)
    entries = json.loads(job.run("rannc-cache", "ls", "--json"))
    assert len([entry for entry in entries if entry["kind"] == "trace"]) == 2


def test_ranks_whose_modules_differ_trace_and_say_so(job: Job, tmp_path: Path) -> None:
    """In stages, only one of the ranks runs the leaf, which counts its calls."""
    output = job.train(2, str(_write(tmp_path)), RANNC_PARTITION_NUM="2")
    assert "The trace cannot be cached: rank 1's model differs from rank 0's in its modules" in output, output


def test_changed_code_is_traced_anew(job: Job, tmp_path: Path) -> None:
    script = _write(tmp_path)
    first = job.train(1, str(script))
    for old, new in (("SCALE = 0.5", "SCALE = 0.25"), ("nn.Tanh()", "nn.ReLU()"), ("a * 2", "a * 3")):
        text = (tmp_path / "model.py").read_text()
        assert old in text
        (tmp_path / "model.py").write_text(text.replace(old, new))
        changed = job.train(1, str(script), **DEBUG)
        assert "Using trace" not in changed, old
        assert _values(changed) != _values(first)
        first = changed
    assert "Using trace" in job.train(1, str(script), **DEBUG)


@pytest.mark.long
def test_what_the_fingerprint_cannot_see_is_traced_every_time(job: Job, tmp_path: Path) -> None:
    script = _write(tmp_path)
    text = MODEL.replace("SCALE = 0.5", "import os\nSCALE = 0.5").replace("* SCALE", "* float(os.environ['SCALE'])")
    (tmp_path / "model.py").write_text(text)
    first = job.train(1, str(script), SCALE="0.5")
    assert "The trace cannot be cached: " in first
    second = job.train(1, str(script), SCALE="0.25", **DEBUG)
    assert "Using trace" not in second
    assert _values(first) != _values(second)


LENGTHS = """
import sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(20, 8), nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        a = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            a = layer(a)
        return self.head(a)

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank = 0
if len(sys.argv) < 2:
    import pyrannc
    model = pyrannc.RaNNCModule(model, optimizer)
    rank = pyrannc.get_rank()
torch.manual_seed(1)
for step, (rows, length) in enumerate(((4, 9), (4, 7), (2, 12), (6, 9), (4, 31), (4, 1), (4, 7))):
    optimizer.zero_grad()
    ids = torch.randint(20, (rows, length))
    out = model(ids)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    print(f"rank={rank} step={step} loss={loss.item():.12f}", flush=True)
"""


@pytest.mark.long
def test_changing_lengths_share_a_trace(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LENGTHS)
    job.run("rannc-cache", "clear")
    output = job.train(2, str(script), RANNC_PARTITION_NUM="2", **DEBUG)
    assert output.count("Tracing model for any size of argument 0[1] ...") == 1
    alone = job.alone(str(script), "alone")
    _assert_losses(output, alone, steps=7)
    again = job.train(2, str(script), RANNC_PARTITION_NUM="2", **DEBUG)
    assert "Tracing model" not in again, "each length is made from the trace of any"
    assert re.search(r"Using trace [0-9a-f]+ for any size of argument 0\[1\] from the cache", again)
    assert _values(again) == _values(output)


AUTOCAST = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank = 0
if len(sys.argv) < 2:
    import pyrannc
    model = pyrannc.RaNNCModule(model, optimizer)
    rank = pyrannc.get_rank()
torch.manual_seed(1)
for step in range(4):
    optimizer.zero_grad()
    data = torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step != 2):
        out = model(data)
    assert out.dtype == (torch.float32 if step == 2 else torch.bfloat16), out.dtype
    loss = out.float().square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank={rank} step={step} loss={loss.item():.12f}", flush=True)
"""


def test_autocast_is_respected_also_where_stages_are_recomputed(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AUTOCAST)
    plain = job.train(2, str(script), RANNC_PARTITION_NUM="2", RANNC_PIPELINE_NUM="1")
    again = job.train(2, str(script), RANNC_PARTITION_NUM="2", RANNC_PIPELINE_NUM="1", RANNC_CHECKPOINTING="true")
    assert _values(again) == _values(plain)
    _assert_losses(plain, job.alone(str(script), "alone"), steps=4, tolerance=5e-3)


META = """
import torch, pyrannc

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
wrapped = pyrannc.RaNNCModule(model, torch.optim.AdamW(model.parameters()))
wrapped(torch.randn(4, 4096))
print("Finished")
"""


@pytest.mark.long
def test_a_model_on_the_meta_device_is_planned_without_memory(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(META)
    output = job.train(
        1, str(script), RANNC_PARTITIONING_DRY_RUN_NP="4", RANNC_MEM_LIMIT_GB="0.7", RANNC_ZERO_STAGE="0"
    )
    assert re.search("^plan      [234] stages: ", output, re.MULTILINE)
    assert "Finished" not in output
