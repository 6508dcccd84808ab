"""Hashes of whole graphs: equal everywhere, different for anything that changes what is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from layered_model import Model, digest
from pieces import Small, graph_of, signature_of
from torch import nn

from rannd.graph.model import build

HERE = Path(__file__).parents[1]
REFERENCE = digest()


def test_weights_and_batch_size_do_not_matter() -> None:
    assert digest(seed=5) == REFERENCE
    for rows in (1, 7):
        assert digest(rows=rows) == REFERENCE


def test_equal_in_another_process() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import layered_model; print(layered_model.digest())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(HERE)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == REFERENCE


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"width": 16},
        {"p": 0.2},
        {"eps": 1e-6},
        {"tied": False},
        {"act": torch.tanh},
        {"scale": 3.0},
        {"constant": 2.0},
        {"time": 6},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_changes_it(change: dict[str, Any]) -> None:
    assert digest(**change) != REFERENCE


def test_what_no_operator_reads_changes_it() -> None:
    """A plan names the stage that holds it: that of a model without it has none."""
    ids = torch.randint(0, 11, (4, 5))
    found = [REFERENCE]
    for more in (nn.Linear(3, 4), nn.Linear(3, 5), nn.BatchNorm1d(3, affine=False)):
        model = Model()
        model.more = more
        found.append(graph_of(model, ids).task.graph_hash)
    assert len(set(found)) == len(found)


def test_modes_and_types_change_it() -> None:
    ids = torch.randint(0, 11, (4, 5))
    frozen = Model()
    frozen.layers[0][0].weight.requires_grad_(False)
    found = [REFERENCE, graph_of(Model().eval(), ids).task.graph_hash, graph_of(frozen, ids).task.graph_hash]
    found.append(graph_of(Model().double(), ids).task.graph_hash)
    found.append(graph_of(Model(), ids.int()).task.graph_hash)
    with torch.no_grad():
        found.append(graph_of(Model(), ids).task.graph_hash)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.append(graph_of(Model(), ids).task.graph_hash)
    assert len(set(found)) == len(found)


def test_ranks_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is made on the way is made on each rank's device."""
    fake_cuda.pretend(monkeypatch)
    found = []
    for ordinal in range(2):
        model = Small(lambda m, x: x @ m.w + torch.arange(6, device=x.device))
        signature, tensors = signature_of(model, torch.randn(4, 6))
        found.append(build(model, signature, tensors, torch.device("cuda", ordinal)).task)
    assert any(op.target == "aten::add.Tensor" for op in found[0].ops)
    assert found[0].graph_hash == found[1].graph_hash
    assert found[0] == found[1]


def test_an_inputs_gradient_changes_it() -> None:
    model = nn.Linear(3, 3)
    plain, wanted = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    assert graph_of(model, plain).task.graph_hash != graph_of(model, wanted).task.graph_hash
