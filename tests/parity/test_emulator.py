"""The yardstick itself: against DistributedDataParallel, and against plain training on the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.case import STEPS, Case
from parity.compare import differences
from parity.emulator import Emulator, emulate
from parity.launch import Home, Outcome, run
from parity.record import Record
from parity.zoo import OPTIMIZERS, ZOO, build_batch, build_model

DDP = [
    Case("tutorial", ranks=2),
    Case("tutorial", ranks=2, optimizer="groups", rows=(5, 3), late_rows=(2, 1)),
    Case("tutorial", ranks=2, optimizer="adamw", rows=(4, 0)),
    Case("mean", ranks=2, optimizer="adam", script="average"),
    Case("mean", ranks=2, rows=(5, 2)),
    Case("sum", ranks=2, rows=(5, 2)),
    Case("masked", ranks=2),
    Case("convnorm", ranks=2, script="evaluate"),
    Case("convnorm", ranks=2, script="plain", rows=(6, 3)),
    Case("convloss", ranks=2, optimizer="adamw"),
    Case("running", ranks=2),
    Case("counter", ranks=2, script="accumulate"),
    Case("unused", ranks=2, optimizer="adamw"),
    Case("frozen", ranks=2, script="decay"),
    Case("finetuned", ranks=2),
    Case("auxiliary", ranks=2, optimizer="adamw"),
    Case("tied", ranks=2, script="delay"),
    Case("skip", ranks=2, script="accumulate", rows=(3, 7)),
    Case("nested", ranks=2, script="latezero"),
    Case("lstm", ranks=2),
    Case("attention", ranks=2),
    Case("gpt2", ranks=2, optimizer="adamw", script="delay"),
]
BROKEN = Case("no such model", ranks=2)


@pytest.fixture(scope="module")
def under_ddp(home: Home) -> dict[str, Outcome]:
    # a case that fails in the middle: those behind it must run all the same
    return run([*DDP[:3], BROKEN, *DDP[3:]], home, "ddp")


@pytest.mark.ranks
@pytest.mark.parametrize("case", DDP, ids=lambda case: case.name)
def test_emulation_equals_distributed_data_parallel(case: Case, under_ddp: dict[str, Outcome]) -> None:
    outcome = under_ddp[case.name]
    assert not outcome.error, outcome.error
    want = emulate(case)
    # DistributedDataParallel hands rank 0's buffers to the others at the next forward, not after the last
    for record in (want[1], outcome.records[1]):
        for name in [name for name in record if name.startswith("end/state/")]:
            del record[name]
    assert differences(want, outcome.records) == []


@pytest.mark.ranks
def test_a_case_that_fails_says_why(under_ddp: dict[str, Outcome]) -> None:
    assert "KeyError: 'no such model'" in under_ddp[BROKEN.name].error


@pytest.mark.parametrize(
    "case",
    [
        Case("mean", ranks=3, rows=(4, 4, 4)),
        Case("mean", ranks=3, rows=(5, 1, 3), optimizer="adamw"),
        Case("mean", ranks=4, rows=(0, 7, 0, 3)),
        Case("regularised", ranks=2, rows=(2, 6)),
        Case("convnorm", ranks=1),
        Case("gpt2", ranks=2, rows=(1, 4), optimizer="adam"),
    ],
    ids=lambda case: case.name,
)
def test_a_mean_loss_equals_training_on_the_whole_batch(case: Case) -> None:
    """Where rows are independent, uneven mini-batches change nothing: one process that sees all rows agrees."""
    model = build_model(case, rank=0)
    optimizer = OPTIMIZERS[case.optimizer](model)
    losses = []
    for step in range(STEPS):
        batches = [build_batch(case, step, 0, rank)[0] for rank in range(case.ranks)]
        arguments = [torch.cat(tensors) for tensors in zip(*(args for args, _ in batches), strict=True)]
        named = {name: torch.cat([kw[name] for _, kw in batches]) for name in batches[0][1]}
        output = model(*arguments, **named)
        optimizer.zero_grad()
        loss = ZOO[case.model].objective(output, case.total_rows(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    record = emulate(case)[0]
    assert [record[f"{step}/0/loss"].item() for step in range(STEPS)] == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(record[f"end/param/{name}"], parameter.detach().numpy(), rtol=0, atol=1e-12)


def test_local_losses_outside_weigh_ranks_alike_whatever_their_rows() -> None:
    """Two ranks with 1 and 7 rows: the gradient is the plain mean, as in DistributedDataParallel."""
    case = Case("tutorial", ranks=2, rows=(1, 7))
    wanted = []
    for rank in range(2):
        model = build_model(case, rank=0)
        (args, _), rows = build_batch(case, 0, 0, rank)
        ZOO[case.model].objective(model(*args), rows).backward()
        wanted.append(model.layers[0].weight.grad)
    mean = (wanted[0] + wanted[1]) / 2
    np.testing.assert_allclose(emulate(case)[0]["0/grad/layers.0.weight"], mean.numpy(), rtol=1e-12)


def test_a_delayed_reduction_is_the_sum_of_both_means() -> None:
    plain, delayed = (emulate(Case("tied", ranks=3, rows=(2, 1, 4), script=s)) for s in ("accumulate", "allreduce"))
    assert differences(plain, delayed) == []


def test_buffers_are_those_of_rank_0_whatever_the_others_see() -> None:
    alone, three = Emulator(Case("running", ranks=1)), Emulator(Case("running", ranks=3))
    for emulator in (alone, three):
        emulator.forward(0, 0)
    wanted = alone.master.mean
    assert wanted.abs().max() > 0
    for model in (three.master, *three.replicas):
        assert torch.equal(model.mean, wanted)


def test_a_buffer_counts_calls_not_ranks() -> None:
    assert emulate(Case("counter", ranks=3, script="accumulate"))[0]["end/state/calls"] == 2 * STEPS


@pytest.mark.parametrize("model", ZOO)
def test_every_model_of_the_zoo_trains(model: str) -> None:
    """A yardstick that stands still measures nothing: losses are finite, and every parameter with a gradient moves."""
    case = Case(model, ranks=2, optimizer="sgd", rows=(4,))
    start = dict(build_model(case, rank=0).named_parameters())
    record: Record = emulate(case)[1]
    assert all(np.isfinite(record[f"{step}/0/loss"]) for step in range(STEPS))
    moved = {name for name in start if f"0/grad/{name}" in record}
    if model.startswith("conv"):
        moved -= {"conv1.bias", "conv2.bias"}  # BatchNorm takes them out again
    assert moved
    for name in moved:
        assert np.abs(record[f"0/grad/{name}"]).max() > 1e-6
        assert np.abs(record[f"end/param/{name}"] - start[name].detach().numpy()).max() > 1e-7
    still = {name for name in start if f"0/nograd/{name}" in record}
    assert bool(still) == (model in ("frozen", "finetuned", "unused", "auxiliary", "filled"))
