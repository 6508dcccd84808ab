"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def core_count(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use: its affinity, and the quota of its control group (containers).

    `groups`: Where control groups are mounted.
    """
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            told = " ".join((groups / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, told.split())
        except (OSError, ValueError):  # not this version; "max": no quota
            continue
        if quota > 0 and period > 0:
            return max(1, min(cores, math.ceil(quota / period)))
    return cores
