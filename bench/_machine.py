"""What results depend on: the machine, and the versions of what runs on it."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "deepspeed", "mpi4py", "numpy")
TURNS = 2_000_000


def machine() -> dict[str, str | int]:
    """Processor, cores, memory and system."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": psutil.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"Linux {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Of Python, and of the packages that there are."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def speed() -> float:
    """Seconds of a fixed loop: virtual machines are slower at times, which absolute times show and ratios do not."""
    begun = time.perf_counter()
    number = 0
    while number < TURNS:
        number += 1
    return time.perf_counter() - begun


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
