"""The device that is measured, and what else has to be known to read the figures."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Here:
    """The device, and whether sizes are those of a GPU."""

    device: torch.device

    @property
    def small(self) -> bool:
        """Small sizes, for a CPU, where times and estimates are reported but not judged."""
        return self.device.type == "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        if not self.small:
            torch.accelerator.synchronize(self.device)

    def compute(self) -> None:
        """Compute something; raises if the device cannot any more."""
        torch.ones(1, device=self.device).add_(1)
        self.synchronize()


def find(wanted: str) -> Here:
    """The device for `auto`, `cpu` or `cuda`. SystemExit: there is none."""
    has = torch.cuda.is_available()
    if wanted == "cuda" and not has:
        raise SystemExit("gpu.py: torch sees no CUDA device; --device cpu runs the small form")
    return Here(torch.device("cuda", 0) if has and wanted != "cpu" else torch.device("cpu"))


def facts(here: Here) -> dict[str, Any]:
    """Device, versions and date."""
    found: dict[str, Any] = {"device": "cpu, small form: times and estimates are not judged"}
    if not here.small:
        properties = torch.cuda.get_device_properties(here.device)
        found = {
            "device": properties.name,
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "CUDA": f"{torch.version.cuda}, compute capability {properties.major}.{properties.minor}",
        }
    found |= {"torch": torch.__version__, "Python": platform.python_version()}
    for name in ("transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["cores"] = len(os.sched_getaffinity(0))
    found["load average"] = " ".join(f"{each:.1f}" for each in os.getloadavg())
    found["commit"] = _commit()
    found["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return found


def _commit() -> str:
    """The commit of the sources; a copy of the files alone does not know it."""
    try:
        told = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "not known"
    return told.stdout.strip() or "not known"


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Environment variables `RANNC_<NAME>` for the models that are wrapped inside; no others of that kind."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RANNC_")}
    kept = ("RANNC_CONF_DIR", "RANNC_DEVICE", "RANNC_LOG_LEVEL", "RANNC_CACHE")
    for name in before:
        if name not in kept:
            del os.environ[name]
    os.environ.update({f"RANNC_{name}": value for name, value in values.items()})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RANNC_")]:
            del os.environ[name]
        os.environ.update(before)
