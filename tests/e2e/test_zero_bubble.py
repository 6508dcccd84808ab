"""Training under zero-bubble gives what it gives under 1F1B."""

from __future__ import annotations

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("ranks", "zero"), first(1, [(2, "0"), (4, "1")]))
def test_what_is_trained_does_not_depend_on_when_gradients_of_parameters_are_computed(
    job: Job, ranks: int, zero: str
) -> None:
    plan = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "4", "RANNC_ZERO_STAGE": zero}
    output = job.train(ranks, "tests/e2e/programs/zero_bubble.py", **plan)
    assert output.count("values are equal") == ranks
