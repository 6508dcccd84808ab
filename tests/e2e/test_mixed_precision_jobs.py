"""Master weights and types of reduced gradients on real ranks, compared with PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks
MASTERS, REDUCED = "tests/e2e/programs/master_weights.py", "tests/e2e/programs/reduce_dtypes.py"


def _plan(stages: int, zero: int) -> dict[str, str]:
    """With one stage one microbatch, so that sums have the order of one process."""
    microbatches = "1" if stages == 1 else "0"
    return {
        "RANNC_PARTITION_NUM": str(stages),
        "RANNC_ZERO_STAGE": str(zero),
        "RANNC_PIPELINE_NUM": microbatches,
    }


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two replicas that share master weights have saved; they equal one process bit for bit."""
    folder = tmp_path_factory.mktemp("masters") / "checkpoint"
    assert job.train(2, MASTERS, "train", str(folder), **_plan(1, 1)).count("is right under 1 stages, ZeRO 1") == 2
    return folder


@pytest.mark.parametrize(
    ("ranks", "stages", "zero"),
    first(1, [(3, 2, 1), (2, 1, 0), (1, 1, 0), (2, 1, 2), (2, 1, 3), (4, 2, 3)]),
)
def test_training_equals_masters_kept_by_hand(job: Job, tmp_path: Path, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, MASTERS, "train", str(tmp_path / "checkpoint"), **_plan(stages, zero))
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks


@pytest.mark.parametrize(("ranks", "stages", "zero"), first(1, [(3, 2, 1), (2, 2, 0)]))
def test_so_it_does_where_weight_gradients_are_delayed(
    job: Job, tmp_path: Path, ranks: int, stages: int, zero: int
) -> None:
    plan = {**_plan(stages, zero), "RANNC_SCHEDULE": "zb_h1", "RANNC_PIPELINE_NUM": "2"}
    output = job.train(ranks, MASTERS, "train", str(tmp_path / "checkpoint"), **plan)
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks


@pytest.mark.parametrize(("ranks", "stages", "zero"), first(1, [(3, 2, 1), (1, 1, 0), (2, 1, 3)]))
def test_a_checkpoint_goes_on_under_any_plan(job: Job, saved: Path, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, MASTERS, "resume", str(saved), **_plan(stages, zero))
    assert output.count(f"is right under {stages} stages, ZeRO {zero}") == ranks


def test_a_checkpoint_without_masters_begins_them(job: Job, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    job.train(2, MASTERS, "plain", folder, **_plan(1, 1))
    output = job.train(2, MASTERS, "bare", folder, **_plan(2, 0))
    assert output.count("is right under 2 stages") == 2
    assert output.count("has no master weights: they begin with the values of the parameters") == 1


@pytest.mark.parametrize(("ranks", "stages", "zero"), first(1, [(3, 2, 1), (2, 1, 0), (2, 1, 2)]))
def test_float16_with_a_scaler(job: Job, ranks: int, stages: int, zero: int) -> None:
    output = job.train(ranks, MASTERS, "scaled", "-", **_plan(stages, zero))
    assert output.count(f"is right under {stages} stages") == ranks


@pytest.mark.parametrize(("model", "reduced"), first(1, [("float32", "bfloat16"), ("bfloat16", "float32")]))
@pytest.mark.parametrize(("ranks", "stages", "zero"), first(1, [(3, 2, 0), (2, 1, 0), (2, 1, 3)]))
def test_gradients_are_reduced_in_another_type(
    job: Job, model: str, reduced: str, ranks: int, stages: int, zero: int
) -> None:
    output = job.train(ranks, REDUCED, model, reduced, RANNC_REDUCE_DTYPE=reduced, **_plan(stages, zero))
    assert output.count(f"of {stages} stages, ZeRO {zero}, is right") == 7 * ranks
