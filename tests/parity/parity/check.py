"""The test of all files of cases: training under pyrannc equals the emulated training, case by case.

Ranks are started once per number of ranks (and per `BATCH` cases); each test reads its own case's record, so a
failure names the case and the first tensor that deviates, in the order of time. A file has its cases in `CASES`.
"""

from __future__ import annotations

import pytest

from parity.case import Case
from parity.compare import differences, plan_differences
from parity.emulator import emulate
from parity.launch import Home, Outcome, run

BATCH = 40
"""Cases of one start of ranks."""

SHOWN = 12
"""Differences that a failing test shows."""


@pytest.mark.ranks
@pytest.mark.timeout(3600)  # the first test of a start waits for all its cases; hangs end in the worker
def test_training_equals_the_emulation(
    case: Case, request: pytest.FixtureRequest, home: Home, outcomes: dict[str, Outcome]
) -> None:
    if case.name not in outcomes:
        outcomes.update(run(_batch_of(case, request), home))
    outcome = outcomes.pop(case.name)
    if outcome.error:
        pytest.fail(outcome.error, pytrace=False)
    wrong = plan_differences(case, outcome.records) + differences(emulate(case), outcome.records, case.precision)
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} differences, the first:", *wrong[:SHOWN]]), pytrace=False)


def _batch_of(case: Case, request: pytest.FixtureRequest) -> list[Case]:
    """The selected cases that run in the same start as `case`."""
    selected: list[Case] = []
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        if item.path == request.path and call is not None and call.params["case"].ranks == case.ranks:
            selected.append(call.params["case"])
    start = selected.index(case) // BATCH * BATCH
    return selected[start : start + BATCH]
