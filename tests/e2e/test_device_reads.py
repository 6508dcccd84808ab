"""A steady step reads the device once, whatever trains; a NaN that is noticed one step late names its step."""

from __future__ import annotations

import re

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/steady_step.py"
LATE = {"RANNC_TRANSPORT": "strict", "RANNC_PIPELINE_NUM": "2"}


@pytest.mark.parametrize(
    ("ranks", "kind", "variables"),
    [
        (2, "scaled", {"RANNC_PARTITION_NUM": "2"}),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                (2, "clipped", {"RANNC_PARTITION_NUM": "2"}),
                (1, "plain", {"RANNC_PARTITION_NUM": "1"}),
                (2, "plain", {"RANNC_PARTITION_NUM": "1"}),
                (2, "delayed", {"RANNC_PARTITION_NUM": "2"}),
                (3, "clipped", {"RANNC_PARTITION_NUM": "2", "RANNC_INTERLEAVE_LOSS": "false"}),
            ]
        ),
    ],
)
def test_a_steady_step_reads_the_device_once(job: Job, ranks: int, kind: str, variables: dict[str, str]) -> None:
    output = job.train(ranks, PROGRAM, kind, **LATE, **variables)
    told = re.findall(r"step \d: (.*)", output)
    assert len(told) == 4 * ranks, output
    assert set(told) == {"1 reads; beside them: []; inputs kept: False"}, output


def test_what_the_steps_are_compared_with_does_read(job: Job) -> None:
    """Over gloo values are read at once: the count and the search for lines are not blind."""
    output = job.train(2, PROGRAM, "clipped", RANNC_PARTITION_NUM="2")
    counts = re.findall(r"step \d: (\d+) reads", output)
    assert len(counts) == 8, output
    assert all(int(count) > 3 for count in counts), output


@pytest.mark.parametrize(("step", "goes_on_to"), [(3, 3), (5, 5)])
def test_a_nan_names_its_step_and_model_though_it_is_noticed_later(job: Job, step: int, goes_on_to: int) -> None:
    """In the next call; after the last one, before a state is gathered."""
    output = job.train(2, PROGRAM, "nan", str(step), code=1, RANNC_PARTITION_NUM="2", **LATE)
    assert re.search(
        rf"NotANumberError: the model's loss .* was NaN in step {step} of Model, and optimizer steps", output
    ), output
    assert f"step {goes_on_to}: " in output
    assert f"step {goes_on_to + 1}: " not in output
    assert "odict_keys" not in output
