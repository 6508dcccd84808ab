"""bench/memory.py: with a small model it measures what docs/benchmarks.md says of a larger one."""

from __future__ import annotations

import re
import sys

import pytest
from job import Job

SMALL = ("--ranks", "2", "--layers", "1", "--width", "64", "--words", "512", "--length", "32", "--rows", "2")


@pytest.mark.ranks
def test_offloaded_state_is_not_in_memory(job: Job) -> None:
    output = job.run(sys.executable, "bench/memory.py", "offload", "--rounds", "2", "--steps", "1", *SMALL)
    found = re.search(r"offloaded: (\S+) MiB of state, (\S+) in memory between steps; .* elsewhere (\S+);", output)
    assert found is not None, output
    whole, here, planned = map(float, found.groups())
    assert here <= 0.02 * whole
    assert planned == pytest.approx(whole, rel=0.02)
    assert "a step takes" in output


@pytest.mark.ranks
def test_zero_divides_state_and_trains_where_nothing_else_fits(job: Job) -> None:
    output = job.run(sys.executable, "bench/memory.py", "bytes", "fit", *SMALL)
    parts = re.findall(r"ZeRO \d: \w+ are (\S+) of the whole, 1 / 2 is due", output)
    assert len(parts) == 1 + 2 + 3, output
    assert [float(part) for part in parts] == pytest.approx([0.5] * 6, rel=0.02)
    assert re.search(r"one stage: 1 stage, ZeRO [123]:", output), output
    needed = re.search(r"at least (\S+) MiB without ZeRO, \S+ with it; limit (\S+);", output)
    assert needed is not None, output
    assert float(needed[1]) > float(needed[2])
