"""Ranks whose calls have different sizes beside the number of samples."""

from __future__ import annotations

import pytest
from job import ROOT, Job

PROGRAM = str(ROOT / "tests" / "e2e" / "programs" / "lengths.py")


STAGES = {"RANNC_PARTITION_NUM": "2"}
PIPELINE = {**STAGES, "RANNC_PIPELINE_NUM": "3"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "words", "settings"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                (2, "inside apart large cut", PIPELINE),
                (2, "inside few", {}),
                (3, "outside branch", {}),
                (2, "outside", STAGES),
                (4, "inside apart uneven", {**PIPELINE, "RANNC_TRANSPORT": "strict"}),
                (2, "outside apart", {"RANNC_ZERO_STAGE": "3"}),
                (3, "outside apart", {**PIPELINE, "RANNC_PARTITION_NUM": "3"}),
                (4, "inside apart uneven", {**PIPELINE, "RANNC_ZERO_STAGE": "2"}),
                (2, "inside apart few", {**PIPELINE, "RANNC_OFFLOAD_ACTIVATIONS": "true"}),
            ]
        ),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [
                (2, "outside", {}),
                (2, "inside apart", PIPELINE),
                (3, "inside apart", {**PIPELINE, "RANNC_SCHEDULE": "zb_h1"}),
                (2, "inside apart", {**PIPELINE, "RANNC_SCHEDULE": "gpipe", "RANNC_CHECKPOINTING": "true"}),
                (4, "inside apart uneven", {**PIPELINE, "RANNC_ZERO_STAGE": "3"}),
                (3, "outside", {"RANNC_ZERO_STAGE": "1"}),
                (3, "inside", {"RANNC_TRANSPORT": "strict"}),
                (2, "inside", STAGES),
                (2, "inside", {"RANNC_ZERO_STAGE": "2"}),
            ]
        ),
    ],
)
def test_lengths_of_their_own(job: Job, ranks: int, words: str, settings: dict[str, str]) -> None:
    out = job.train(ranks, PROGRAM, *words.split(), OMP_NUM_THREADS="1", **settings)
    assert out.count("lengths: right") == ranks


@pytest.mark.ranks
def test_lengths_whose_stages_differ_are_refused(job: Job) -> None:
    out = job.train(2, PROGRAM, "outside", "refused", OMP_NUM_THREADS="1", **STAGES)
    assert out.count("lengths: right") == 2


@pytest.mark.long
@pytest.mark.ranks
def test_a_step_of_several_lengths_is_not_audited(job: Job) -> None:
    out = job.run("rannc-run", "-np", "2", "--verify", "4", PROGRAM, "outside", OMP_NUM_THREADS="1")
    assert "ranks pass different sizes" in out
    assert out.count("lengths: right") == 2
