"""One case, run with others of its file in one start of ranks, and compared with the emulation."""

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


def check(case: Case, request: pytest.FixtureRequest, home: Home, outcomes: dict[str, Outcome]) -> None:
    """Fail with the first differences, in the order of time; `outcomes`: of cases that ran before their turn."""
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
