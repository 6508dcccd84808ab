"""A job on several nodes, played on one machine: the ranks are real, that they are on different nodes is not."""

from __future__ import annotations

import re

import pytest
from job import PLANNED, Job

pytestmark = pytest.mark.ranks


@pytest.mark.long
def test_links_inside_nodes_and_between_them_are_measured_and_kept(job: Job) -> None:
    output = job.train(3, "tests/e2e/programs/two_nodes.py")
    assert output.count("places [(0, 0), (0, 1), (1, 2)] agrees") == 3, output
    assert output.count("measured 0 and 2 of [0, 1, 2]") == 3
    assert output.count("measured 0 and 1 of [0, 1]") == 2
    assert len(re.findall(r"^links\t", job.run("rannc-cache", "ls"), re.MULTILINE)) == 1
    again = job.train(3, "tests/e2e/programs/two_nodes.py", RANNC_CACHE="refresh", RANNC_MIN_PARTITION_NUM="1")
    assert "measured 0 and 2" in again
    more = job.train(3, "tests/e2e/programs/two_nodes.py", RANNC_MEM_MARGIN="0.2")
    assert PLANNED in more, "another margin is another plan"
    assert "measured" not in more, "the links are known"
