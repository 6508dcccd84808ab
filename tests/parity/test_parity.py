"""Training under pyrannc equals the emulated training, case by case: the cases of every run.

Ranks are started once per number of ranks (and per `BATCH` cases); each test reads its own case's record, so a
failure names the case and the first tensor that deviates, in the order of time.
"""

from __future__ import annotations

import pytest
from parity.case import Case
from parity.cases import COMPACT, DRAWN
from parity.check import check
from parity.launch import Home, Outcome
from parity.several import SEVERAL


@pytest.mark.ranks
@pytest.mark.timeout(3600)  # the first test of a start waits for all its cases; hangs end in the worker
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in (*COMPACT, *DRAWN, *SEVERAL)])
def test_training_equals_the_emulation(
    case: Case, request: pytest.FixtureRequest, home: Home, outcomes: dict[str, Outcome]
) -> None:
    check(case, request, home, outcomes)
