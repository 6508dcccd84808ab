"""bench/memory.py: with a small model it measures what docs/benchmarks.md says of a larger one."""

from __future__ import annotations

import re
import sys

import pytest
from job import Job

SMALL = ("--ranks", "2", "--layers", "1", "--width", "64", "--words", "512", "--length", "32", "--rows", "2")


@pytest.mark.full
@pytest.mark.ranks
def test_what_is_offloaded_is_not_in_memory(job: Job) -> None:
    large = (*SMALL, "--width", "256", "--words", "2048")
    output = job.run(sys.executable, "bench/memory.py", "offload", "--rounds", "2", "--steps", "1", *large)
    for name, parts in (("in memory", ""), ("state", "o"), ("parameters", "pg"), ("both", "pgo")):
        (line,) = re.findall(rf"^{name}: (parameters .*); planned elsewhere (\S+) MiB$", output, re.MULTILINE)
        sizes = {
            what[0]: (float(size), float(here))
            for what, size, here in re.findall(r"(\w+) (\S+) MiB, (\S+) of it in memory", line[0])
        }
        assert sorted(sizes) == ["g", "o", "p"]
        for what, (size, here) in sizes.items():
            assert here <= 0.02 * size if what in parts else here == size, (name, what)
        # as much again is planned for gradients that wait
        planned = sum(size * (1 + (what == "g")) for what, (size, _) in sizes.items() if what in parts)
        assert float(line[1]) == pytest.approx(planned, rel=0.02)
    assert output.count(": a step takes ") == 4


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.ranks
def test_a_third_of_the_training_state_is_memory_enough(job: Job) -> None:
    output = job.run(sys.executable, "bench/memory.py", "larger", "--layers", "8")
    found = re.search(
        r"^training state (\d+) MiB; limit of a process (\d+),[^$]* most private memory (\d+) MiB$", output, re.M
    )
    assert found is not None, output
    state, limit, most = map(int, found.groups())
    assert most <= limit <= state // 3 + 1
