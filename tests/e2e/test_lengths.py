"""Ranks whose calls have different sizes beside the number of samples."""

from __future__ import annotations

import pytest
from job import ROOT, Job

PROGRAM = str(ROOT / "tests" / "e2e" / "programs" / "lengths.py")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "loss", "settings"),
    [
        (2, "outside", {}),
        (2, "inside", {}),
        (2, "outside", {"RANNC_PARTITION_NUM": "2"}),
        pytest.param(3, "outside", {"RANNC_ZERO_STAGE": "1"}, marks=pytest.mark.long),
        pytest.param(3, "inside", {"RANNC_TRANSPORT": "strict"}, marks=pytest.mark.long),
        pytest.param(2, "outside", {"RANNC_ZERO_STAGE": "3"}, marks=pytest.mark.long),
    ],
)
def test_lengths_of_their_own(job: Job, ranks: int, loss: str, settings: dict[str, str]) -> None:
    out = job.train(ranks, PROGRAM, loss, OMP_NUM_THREADS="1", **settings)
    assert out.count("lengths: right") == ranks


@pytest.mark.long
@pytest.mark.ranks
def test_a_step_of_several_lengths_is_not_audited(job: Job) -> None:
    out = job.run("rannc-run", "-np", "2", "--verify", "4", PROGRAM, "outside", OMP_NUM_THREADS="1")
    assert "ranks pass different sizes" in out
    assert out.count("lengths: right") == 2
