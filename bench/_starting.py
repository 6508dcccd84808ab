"""Starts jobs of two ranks with a separate cache and daemon, as a user would, and collects their measurements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from _gpt2 import Told
from _results import Spread, Table

SCRIPTS = Path(sysconfig.get_path("scripts"))
GPT2 = str(Path(__file__).with_name("_gpt2.py"))
RANNC_RUN = [str(SCRIPTS / "rannc-run"), "-np", "2"]
TORCHRUN = [str(SCRIPTS / "torchrun"), "--nproc-per-node", "2"]
MPIRUN = [str(SCRIPTS / "mpirun"), "-np", "2", "--oversubscribe", "--bind-to", "none"]
_OURS = ("RANNC_", "OMP_", "MALLOC_", "MASTER_", "PYTHONDONTWRITEBYTECODE")
LONGEST_S = 600


@contextmanager
def home() -> Iterator[dict[str, str]]:
    """Context manager with temporary runtime, cache and configuration folders; ends the daemon at exit.

    Yields environment variables that point to these folders. Variables that would tune or plan a job are removed, as is
    PYTHONDONTWRITEBYTECODE, which would make Python compile rannd's modules (but not torch's) at each start.
    """
    base = Path(tempfile.mkdtemp(prefix="rannd-bench-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    # mpirun refuses to run as root without these; rannc-run sets them itself.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name, variable in (("run", "XDG_RUNTIME_DIR"), ("cache", "XDG_CACHE_HOME"), ("conf", "RANNC_CONF_DIR")):
        (base / name).mkdir(mode=0o700)
        environment[variable] = str(base / name)
    try:
        yield environment
    finally:
        end_daemon(environment)
        shutil.rmtree(base)


def end_daemon(environment: Mapping[str, str]) -> None:
    """Stop the daemon of an environment, if there is one."""
    subprocess.run([str(SCRIPTS / "rannd"), "stop"], env=environment, capture_output=True, timeout=60, check=False)


def timed(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a command and return its wall-clock time in seconds; exits this process if it fails."""
    begun = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_S, check=False
    )
    took = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed (exit code {done.returncode}):\n{(done.stdout + done.stderr).decode()}")
    return took


def gpt2(launcher: Sequence[str], side: str, environment: Mapping[str, str], *options: str) -> tuple[float, list[Told]]:
    """Run _gpt2.py; returns the start time in seconds since the epoch, and the measurements of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        timed([*launcher, GPT2, side, folder, *options], environment)
        return begun, [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2)]


def late(times: Sequence[float]) -> float:
    """95th percentile."""
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.95))]


def tell(title: str, times: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Print times in seconds, and their differences from the first side in the same round.

    Returns the medians of the differences in seconds, and of the ratios to the first side.
    """
    first, *_ = times
    table = Table(f"{title}, {len(times[first])} rounds", "what", ("time", "{:.3f} s"), ("more", "{:+.3f} s"), "ratio")
    more, ratios = {}, {}
    for name, values in times.items():
        if name == first:
            table.row(name, Spread.of(values), None, None)
            continue
        later = Spread.of([b - a for a, b in zip(times[first], values, strict=True)])
        ratio = Spread.of([b / a for a, b in zip(times[first], values, strict=True)])
        table.row(name, Spread.of(values), later, ratio)
        more[name], ratios[name] = later.median, ratio.median
    return more, ratios
