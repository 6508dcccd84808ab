"""Branches on what is in the mini-batches, on two ranks."""

from __future__ import annotations

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/branches.py"


@pytest.mark.parametrize(
    ("what", "stages", "operator"),
    [
        ("differs_at_once", "1", "chosen (Chosen)"),
        pytest.param("differs_at_once", "2", "chosen (Chosen)", marks=pytest.mark.long),
        pytest.param("differs_later", "1", "chosen (Chosen)", marks=pytest.mark.long),
        pytest.param("loops", "1", "the model (Loop)", marks=pytest.mark.long),
        pytest.param("without_rows", "1", None, marks=pytest.mark.long),
    ],
)
def test_ranks_that_branch_differently_run_one_operator(job: Job, what: str, stages: str, operator: str | None) -> None:
    told = f"{operator} takes other branches (`if` on a tensor) for other mini-batches: it runs as one operator"
    for cache in ("off", "on", "on"):
        output = job.train(2, PROGRAM, what, stages, RANNC_PARTITION_NUM=stages, RANNC_CACHE=cache)
        assert output.count(f"{what} is right on rank") == 2
        if cache == "off":
            assert output.count(told) == (operator is not None)
    assert told not in output  # the cached trace has the operator


def test_what_is_divided_cannot_become_one_operator(job: Job) -> None:
    output = job.train(2, PROGRAM, "divided", "2", RANNC_PARTITION_NUM="2")
    assert output.count("divided is right on rank") == 2
