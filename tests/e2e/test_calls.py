"""All ways of calling a wrapped model, on real ranks, equal one process."""

from __future__ import annotations

import pytest
from job import ROOT, Job

PROGRAM = str(ROOT / "tests" / "e2e" / "programs" / "calls.py")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "stages", "microbatches", "schedule"),
    [
        pytest.param(1, 1, 2, "1f1b", marks=pytest.mark.long),
        pytest.param(2, 1, 1, "1f1b", marks=pytest.mark.long),
        (2, 2, 2, "1f1b"),
        pytest.param(3, 2, 2, "1f1b", marks=pytest.mark.long),
        pytest.param(4, 3, 4, "gpipe", marks=pytest.mark.long),
    ],
)
def test_every_way_of_calling(job: Job, ranks: int, stages: int, microbatches: int, schedule: str) -> None:
    out = job.train(
        ranks,
        PROGRAM,
        RANNC_PARTITION_NUM=str(stages),
        RANNC_PIPELINE_NUM=str(microbatches),
        RANNC_SCHEDULE=schedule,
        OMP_NUM_THREADS="1",
    )
    assert out.count("calls: all equal") == ranks
