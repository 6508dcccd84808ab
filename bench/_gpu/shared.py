"""Two and four ranks on the one device: parity over the staged transport, and what is told of ranks that fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from _gpu.alike import CLOSE
from _gpu.machine import Here
from _gpu.ranks import Ended, run
from _gpu.record import Check, Result, at_most

PROGRAM = "tests/e2e/programs/failing.py"
TRAIN_S, FAIL_S = 240.0, 120.0
"""Seconds that ranks may take to train, and to end when one has failed."""


@dataclass(frozen=True)
class Failing:
    """Something that goes wrong on rank 1 in step 3, and how the job ends."""

    what: str
    """What failing.py is told."""
    told: str
    """Pattern of what is told of the error itself."""
    elsewhere: str
    """Pattern of what is told of it as the end of the job."""
    variables: dict[str, str]


WATCH = {"RANNC_RUN_WATCHDOG": "true", "RANNC_WATCHDOG_TIMEOUT_S": "5"}
LATER = {"RANNC_INTERLEAVE_LOSS": "false"}
MICROBATCH = r"rank \d .*failed in step 3, stage \d, microbatch \d of rank \d's mini-batch, action "
FAILURES = {
    "a rank that raises": Failing(
        "model", r"ValueError: the trap is sprung", MICROBATCH + "F", {}
    ),
    "a rank that raises in backward": Failing(
        "backward",
        r"ArithmeticError: the trap is sprung in backward",
        MICROBATCH + "B",
        LATER,
    ),
    "a rank out of memory": Failing(
        "memory",
        r"out of memory on (cuda|cpu).*the plan estimated .* for stage \d",
        r"rank \d .*ran out of memory in step 3, stage \d",
        {},
    ),
    "a rank that hangs in its script": Failing(
        "sleep",
        r"rank 1 is in the script, after step 2, at go_wrong",
        r"RankFailedError: the job hangs: no progress for \d+ s",
        WATCH,
    ),
    "a rank that hangs while the other is in backward": Failing(
        "late",
        r"rank 1 is in the script, .*at go_wrong",
        r"RankFailedError: the job hangs: no progress for \d+ s",
        {**WATCH, **LATER},
    ),
    "a rank that is killed": Failing(
        "kill", r"pid \d+", r"rank 1 .*has ended without an error message", {}
    ),
}  # fmt: skip


def checks(here: Here) -> list[Check]:
    """All checks of this part."""
    listed: list[Check] = [
        (f"{ranks} ranks train", functools.partial(_parity, here, ranks)) for ranks in ((2,) if here.small else (2, 4))
    ]
    listed += [(name, functools.partial(_failing, here, name, failing)) for name, failing in FAILURES.items()]
    if not here.small:
        listed.append(("two ranks on one device without staged", functools.partial(_refused, here)))
    return listed


def _parity(here: Here, ranks: int) -> Iterator[Result]:
    ended = run(here, ranks, "_gpu/shared_rank.py", "train", limit_s=TRAIN_S)
    worst: dict[str, float] = {}
    for each in ended:
        for number, case in re.findall(r"worst (\S+) in (.*)", each.output):
            worst[case] = max(worst.get(case, 0.0), float(number))
    for case, found in worst.items():
        yield at_most(f"{ranks} ranks, {case}", found, CLOSE)
    for rank, each in enumerate(ended):
        if each.code != 0:
            yield Result(f"{ranks} ranks: rank {rank}", False, each.tail())
    yield Result(f"{ranks} ranks: cases", len(worst) > 0, len(worst))


def _failing(here: Here, name: str, failing: Failing) -> Iterator[Result]:
    ended = run(here, 2, PROGRAM, failing.what, "1", limit_s=FAIL_S, RANNC_PARTITION_NUM="2", **failing.variables)
    yield from _judged(name, failing.told, failing.elsewhere, ended)


def _judged(name: str, told: str, elsewhere: str, ended: list[Ended]) -> Iterator[Result]:
    """Whether all ranks have ended by themselves, with errors, and have said what went wrong."""
    stuck = [str(rank) for rank, each in enumerate(ended) if each.code is None]
    yield Result(f"{name}: all ranks end", not stuck, f"ranks {', '.join(stuck)} had to be killed" if stuck else "yes")
    wrong = [str(rank) for rank, each in enumerate(ended) if each.code == 0]
    yield Result(
        f"{name}: none with exit code 0", not wrong, f"ranks {', '.join(wrong)}: exit code 0" if wrong else "yes"
    )
    both = "\n".join(each.output for each in ended)
    for pattern in (told, elsewhere):
        found = re.search(pattern, both)
        note = "" if found else " // ".join(each.tail() for each in ended)
        yield Result(
            f"{name}: is told", found is not None, found[0][:200] if found else f"nothing like {pattern}", note=note
        )


def _refused(here: Here) -> Iterator[Result]:
    """The transport for GPUs tells ranks of one device by its UUID."""
    ended = run(here, 2, PROGRAM, "nothing", "0", limit_s=FAIL_S, RANNC_TRANSPORT="auto", CUDA_VISIBLE_DEVICES="0")
    name = "two ranks on one device without staged"
    yield from _judged(name, r"ranks 0 and 1 on \S+ share a device", r"transport=staged", ended)
