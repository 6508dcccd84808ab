"""ZeRO on real ranks: equal to one process in all that scripts do with models and optimizers, and re-sharded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from job import Job
from thinned import first
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.ranks
PROGRAM = "tests/e2e/programs/sharded.py"


def _plan(zero: int, stages: int) -> dict[str, str]:
    return {"RANNC_ZERO_STAGE": str(zero), "RANNC_PARTITION_NUM": str(stages)}


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two replicas that share the optimizer's state have saved."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoint"
    output = job.train(2, PROGRAM, "train", str(folder), **_plan(1, 1))
    assert output.count("is right under 1 stages, ZeRO 1") == 2
    assert "1 stage, ZeRO 1:" in output
    shared = [(int(own), int(of)) for own, of in re.findall(r"moments of (\d+) of (\d+) elements", output)]
    assert len(shared) == 2
    for own, of in shared:
        assert abs(own - of / 2) <= 0.02 * of / 2
    return folder


@pytest.mark.parametrize(
    ("ranks", "stages", "zero"),
    first(1, [(3, 2, 1), (2, 1, 3), (2, 1, 2), (4, 2, 3), (4, 2, 1), (3, 1, 2), (4, 2, 2), (3, 1, 3)]),
)
def test_stages_with_replicas_equal_one_process(job: Job, tmp_path: Path, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, PROGRAM, "train", str(tmp_path / "checkpoint"), **_plan(zero, stages))
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks
    if zero == 3:  # pieces of parameters make up whole ones
        output = job.train(1, PROGRAM, "resume", str(tmp_path / "checkpoint"), **_plan(0, 1))
        assert "is right under 1 stages, ZeRO 0" in output


@pytest.mark.parametrize(
    ("ranks", "stages", "zero"), first(3, [(1, 1, 0), (2, 1, 2), (4, 2, 3), (2, 1, 0), (3, 1, 1), (4, 2, 1)])
)
def test_a_checkpoint_goes_on_under_any_plan(job: Job, saved: Path, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, PROGRAM, "resume", str(saved), **_plan(zero, stages))
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks


@pytest.mark.parametrize(("ranks", "stages", "zero"), first(1, [(3, 2, 1), (2, 1, 1), (2, 1, 3)]))
def test_state_that_is_elsewhere_between_steps(
    job: Job, saved: Path, tmp_path: Path, ranks: int, stages: int, zero: int
) -> None:
    plan = {**_plan(zero, stages), "RANNC_OFFLOAD_OPTIMIZER": "true", "RANNC_OFFLOAD_DIR": str(tmp_path / "state")}
    output = job.train(ranks, PROGRAM, "train", str(tmp_path / "checkpoint"), **plan)
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks
    assert "MiB of optimizer state offloaded" in output
    assert list((tmp_path / "state").iterdir()) == []
    if zero == 1:
        for folder, other in ((tmp_path / "checkpoint", _plan(0, 1)), (saved, plan)):
            output = job.train(ranks, PROGRAM, "resume", str(folder), **other)
            assert output.count("is right under") == ranks


def test_torch_reads_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]["state"]
    assert state["second.weight"]["exp_avg"].shape == (403, 401)
    assert state["second.weight"]["exp_avg"].abs().min() > 0
    assert state["first.bias"]["step"] == 2


@pytest.mark.parametrize(
    ("ranks", "stages", "zero"), first(1, [(4, 2, 2), (2, 1, 3), (2, 1, 0), (2, 1, 1), (3, 1, 2), (4, 2, 3)])
)
def test_what_scripts_do_with_gradients(job: Job, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, "tests/e2e/programs/sharded_gradients.py", **_plan(zero, stages))
    assert output.count(f"has right gradients under {stages} stages, ZeRO {zero}") == ranks


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_sparse_gradients(job: Job, zero: int) -> None:
    output = job.train(2, "tests/e2e/programs/sparse_gradients.py", **_plan(zero, 1))
    assert output.count(f"has right sparse gradients under ZeRO {zero}") == 2


@pytest.mark.parametrize(("ranks", "stages"), first(1, [(4, 2), (2, 1)]))
def test_what_scripts_do_with_parameters(job: Job, ranks: int, stages: int) -> None:
    output = job.train(ranks, "tests/e2e/programs/sharded_parameters.py", **_plan(3, stages))
    assert output.count(f"has right parameters under {stages} stages, ZeRO 3") == ranks


def test_parameters_are_gathered_once_if_they_stay_whole(job: Job) -> None:
    plan = {**_plan(3, 1), "RANNC_PIPELINE_NUM": "4", "RANNC_CHECKPOINTING": "false"}
    told = re.compile(r"rank 0: (\d+) gathers of (\d+) segments, whole \[(\w+)\], loss (\S+)")

    def trained(**more: str) -> tuple[int, int, bool, str]:
        found = told.search(output := job.train(2, "tests/e2e/programs/gathers.py", **plan, **more))
        assert found is not None, output
        return int(found[1]), int(found[2]), found[3] == "True", found[4]

    gathers, segments, whole, loss = trained()
    assert (gathers, whole) == (segments, True)
    again, segments, whole, other = trained(RANNC_RESHARD_AFTER_FORWARD="true")
    # The last segment of a forward is whole for the backward that follows, the first of that for the next forward.
    assert (again, whole, other) == (4 * (2 * segments - 2) + 1, False, loss)
