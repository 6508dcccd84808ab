"""Whole jobs over each transport that CPUs have."""

from __future__ import annotations

import re

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/replicated_buffers.py"


@pytest.mark.long
def test_transports_train_alike_with_groups_that_all_ranks_have_made(job: Job) -> None:
    """A group that only its members made would hang in another one's making, or be taken for it."""
    found = {}
    for transport in ("auto", "staged", "strict"):
        variables = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "1", "RANNC_TRANSPORT": transport}
        output = job.run("rannc-run", "-np", "3", PROGRAM, **variables)
        name = {"auto": "gloo"}.get(transport, transport)
        groups = re.findall(rf"groups (.*) for replicas \[(.*)\] over {name}", output)
        assert len(groups) == 3, output
        assert len(set(groups)) == 1
        assert groups[0][1] in groups[0][0]
        found[transport] = sorted(re.findall(r"step \d: \S+", output))
    assert len(found["auto"]) == 9
    assert found["auto"] == found["staged"] == found["strict"]


def test_a_transport_for_gpus_on_cpus(job: Job) -> None:
    output = job.train(2, PROGRAM, code=1, RANNC_TRANSPORT="nccl", RANNC_DEVICE="cpu")
    assert "LaunchError: transport=nccl moves tensors between GPUs, but device is cpu; use auto" in output
