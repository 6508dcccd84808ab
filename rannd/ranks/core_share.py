"""Binds each rank to its share of a machine's cores.

A thread that wakes another one draws it to its own core, and gloo's threads wake ranks with each message. So ranks that
may run anywhere share a core for some milliseconds now and then, until the kernel moves one of them to an idle core
(docs/benchmarks.md, "Ranks that are bound to cores").

Standard library only, as the watcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

CORES_VARIABLE = "RANND_CORES"
"""Number of cores that ranks of a machine share; not set: they may run anywhere. Removed before the rank starts."""
BEFORE_VARIABLE = "RANND_CORES_BEFORE"
"""In a bound rank: the cores that it could run on otherwise, as ``0,1,2,3``."""
_CORES = Path("/sys/devices/system/cpu")
_ACCELERATORS = "/dev/nvidia0", "/dev/kfd"
"""Where there is a GPU, its ranks need the cores near it."""
_ALIKE = 0.1
"""How much slower than the quickest a core may be, relative to it."""


def share(cores: Iterable[int], number: int, parts: int) -> set[int]:
    """Return the cores of part `number` of `parts`; none has less than an equal share, rounded down.

    The threads of a physical core are in one part unless that would leave another one with less; cores of one socket
    are in one part as far as possible.
    """
    ordered = sorted(cores, key=_place)
    whole = [list(threads) for _, threads in itertools.groupby(ordered, key=lambda core: _place(core)[:2])]
    for units in (whole, [[core] for core in ordered]):
        ends = [part * len(units) // parts for part in range(parts + 1)]
        found = [[core for unit in units[begin:end] for core in unit] for begin, end in itertools.pairwise(ends)]
        if min(map(len, found)) >= len(ordered) // parts:
            break
    return set(found[number])


def bind(environ: MutableMapping[str, str]) -> None:
    """Bind this process to the share of its rank, if `CORES_VARIABLE` says so, and no launcher has bound it already."""
    told = environ.pop(CORES_VARIABLE, "")
    number, parts = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    cores = os.sched_getaffinity(0)
    if told and not told.isdecimal() and number == "0":
        print(f"rannc-run: {CORES_VARIABLE}={told!r} is no number: ranks run on all cores, as with 0", file=sys.stderr)
    if not (number.isdecimal() and parts.isdecimal() and str(len(cores)) == told):
        return
    if int(number) < int(parts) <= len(cores) and _are_alike(cores) and not any(map(os.path.exists, _ACCELERATORS)):
        try:
            os.sched_setaffinity(0, share(cores, int(number), int(parts)))
        except OSError as exc:
            print(f"rannc-run: this rank cannot be bound to its cores, it runs on all: {exc}", file=sys.stderr)
        else:
            environ[BEFORE_VARIABLE] = ",".join(map(str, sorted(cores)))


def unbind(environ: Mapping[str, str]) -> None:
    """Let this process, which a bound rank has started, run wherever the rank could before it was bound."""
    cores = [int(core) for core in environ.get(BEFORE_VARIABLE, "").split(",") if core.isdecimal()]
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _are_alike(cores: Iterable[int]) -> bool:
    """Whether cores are about equally fast: those of some processors are large and small ones."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        told = [_told(core, name) for core in cores]
        if min(told) < (1 - _ALIKE) * max(told):
            return False
    return True


def _place(core: int) -> tuple[int, int, int]:
    """Socket, physical core and number of a core."""
    return _told(core, "topology/physical_package_id"), _told(core, "topology/core_id"), core


def _told(core: int, name: str) -> int:
    try:
        return int((_CORES / f"cpu{core}" / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
