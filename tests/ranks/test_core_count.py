"""How many cores this process may use: its affinity, and a container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rannd.ranks.core_count import core_count


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= core_count() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("names", "without"), [(["cpu.max"], "max"), (["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"], "-1")]
)
def test_a_quota_of_a_container_limits_the_cores(tmp_path: Path, names: list[str], without: str) -> None:
    def told(quota: str, period: str) -> int:
        values = [f"{quota} {period}"] if len(names) == 1 else [quota, period]
        for name, value in zip(names, values, strict=True):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{value}\n")
        return core_count(tmp_path)

    cores = len(os.sched_getaffinity(0))
    assert told(without, "100000") == cores
    assert told("50000", "100000") == told("100000", "100000") == 1
    assert told("150000", "100000") == min(2, cores)
    assert told("99900000", "100000") == cores
    assert told("", "") == cores
